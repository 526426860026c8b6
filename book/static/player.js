/* Ranks side by side: plays what real ranks did. A recording (book/recordings/, course_lib/metering/recording.py says what
   it holds) comes as a script that calls courseRecording, so that a page opened from a folder can load it. */
(() => {
  const LINES = 20, CALLS = 13, HELD = 24, GAP = 12, AXIS = 20;  // heights in a lane, in pixels
  const WHOLE_SECONDS = 40;  // that all lanes take to play at speed 1
  const SPEEDS = {"¼": 0.25, "½": 0.5, "1": 1, "2": 2, "4": 4};
  const KINDS = {F: "forward", B: "backward", O: "optimizer", C: "computes", "": "other lines"};
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const waitingFor = {};
  window.courseRecording = (name, recording) => waitingFor[name]?.splice(0).forEach(show => show(recording));

  const element = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value); else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  };
  const drawn = (tag, attributes = {}, title = "") => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (title) {
      const said = document.createElementNS("http://www.w3.org/2000/svg", "title");
      said.textContent = title;
      made.append(said);
    }
    return made;
  };
  const time = micros => micros >= 1e6 ? `${(micros / 1e6).toFixed(2)} s` : `${(micros / 1e3).toFixed(2)} ms`;
  const bytes = size => size >= 1e6 ? `${(size / 1e6).toFixed(1)} MB` : size >= 1e3 ? `${(size / 1e3).toFixed(1)} kB` : `${size} bytes`;
  const ranks = numbers => `rank${numbers.length > 1 ? "s" : ""} ${numbers.join(", ")}`;
  /* The last of some entries, ordered by their first number, that is not after a time; undefined: none. */
  const last = (entries, t) => {
    let low = 0, high = entries.length;
    while (low < high) { const middle = (low + high) >> 1; if (entries[middle][0] <= t) low = middle + 1; else high = middle; }
    return entries[low - 1];
  };

  /* What a recording says of a moment. */
  class Story {
    constructor(recording) {
      Object.assign(this, recording);
      this.painted = new Map(this.paint.map(([place, line, kind]) => [`${place}:${line}`, kind]));
      this.ranks.forEach((lane, rank) => lane.calls.forEach(call => Object.assign(call, {rank, others: []})));
      for (const link of this.links) {
        const calls = link.of.map(([rank, place]) => this.ranks[rank].calls[place]);
        for (const call of calls) Object.assign(call, {others: calls.filter(other => other !== call), fits: link.fits});
      }
      const all = this.ranks.flatMap((lane, rank) => [
        ...lane.lines.map(line => [line[0], rank, "line", line]),
        ...lane.calls.flatMap(call => [[call[0], rank, "call", call], ...(call[1] === null ? [] : [[call[1], rank, "done", call]])]),
        [lane.end.at, rank, "end", lane.end]]);
      this.events = all.sort((one, other) => one[0] - other[0]);
      this.most = Math.max(1, ...this.ranks.flatMap(lane => lane.held.map(one => one[1])));
      this.scale();
    }

    /* Time to place, 0 to 1. A stretch in which nothing happens on any rank is cut where it would leave no room for the
       others: its `breaks` are drawn, with what they leave out. */
    scale() {
      const times = [...new Set([0, ...this.events.map(one => one[0]), this.until])].sort((one, other) => one - other);
      const gaps = times.slice(1).map((t, i) => t - times[i]);
      const order = [...gaps].sort((one, other) => other - one);
      let left = this.until, limit = Infinity;
      for (const gap of order) {
        if (gap < 0.6 * left) break;
        left -= gap;
        limit = gap;
      }
      const room = Math.max(left * 0.25, 1);
      this.points = [[0, 0]];
      this.breaks = [];
      gaps.forEach((gap, i) => {
        const at = this.points[i][1];
        if (gap >= limit) this.breaks.push([times[i], times[i + 1]]);
        this.points.push([times[i + 1], at + (gap >= limit ? Math.min(gap, room) : gap)]);
      });
      this.whole = this.points.at(-1)[1] || 1;
    }

    place(t) {
      const at = Math.max(0, this.points.findLastIndex(point => point[0] <= t));
      const [from, x] = this.points[at], [to, end] = this.points[at + 1] ?? [from + 1, x];
      return (x + (end - x) * Math.min(1, (t - from) / (to - from))) / this.whole;
    }

    moment(place) {
      const wanted = place * this.whole, at = Math.max(0, this.points.findLastIndex(point => point[1] <= wanted));
      const [from, x] = this.points[at], [to, end] = this.points[at + 1] ?? [from, x + 1];
      return from + (to - from) * Math.min(1, (wanted - x) / (end - x));
    }

    source([, place, number]) {
      return place < 0 ? "" : this.code[place].lines[number - this.code[place].first].trim();
    }

    line(rank, t) {
      const line = last(this.ranks[rank].lines, t);
      return line && line[1] >= 0 && t < this.ranks[rank].end.at ? line : null;
    }

    isWaiting(rank, t) {
      const wait = last(this.ranks[rank].waits, t);
      return Boolean(wait) && (wait[1] === null || t < wait[1]);
    }

    /* Ranks that have not come to a call by a time. */
    missing(call, t) {
      const there = call.others.filter(other => other[0] <= t).map(other => other.rank);
      return call[5].filter(rank => rank !== call.rank && !there.includes(rank));
    }

    /* What a rank does, in words. */
    doing(rank, t) {
      const lane = this.ranks[rank], {how, at, said} = lane.end;
      if (t >= at) {
        const waited = lane.end.waits_for, where = lane.end.in ? ` from ${lane.end.in}` : "";
        return how === "returned" ? "has returned" : how === "raised" ? `raised ${said}` : how === "died" ? said
          : `never returned${where}${waited.length ? `: waits for ${ranks(waited)}` : ""}`;
      }
      const open = lane.calls.filter(call => call[0] <= t && (call[1] === null || t < call[1]));
      const line = this.line(rank, t), kind = line && this.painted.get(`${line[1]}:${line[2]}`);
      const where = line ? `line ${line[2]}${kind ? `, ${KINDS[kind]}` : ""}` : "outside the code shown";
      if (!open.length) return line ? `runs ${where}` : `is ${where}`;
      if (!this.isWaiting(rank, t)) return `runs ${where}, ${open[0][2]} under way`;
      const [call] = open, missing = this.missing(call, t), what = `${call[2]} of ${bytes(call[3])}`;
      if (missing.length) return `${where}, ${what}: waits for ${ranks(missing)}`;
      const differing = call.others.filter(other => other[2] !== call[2]);
      if (differing.length) return `${where}, ${what}, and ${ranks(differing.map(other => other.rank))} in ${differing[0][2]}`;
      return `${where}, ${what} with ${ranks(call[5].filter(other => other !== rank))}`;
    }
  }

  class Player {
    constructor(root, recording) {
      this.root = root;
      this.story = new Story(recording);
      this.t = 0;
      this.followed = 0;
      this.zoom = 1;
      root.replaceChildren(this.bar(), this.lanes(), this.below());
      root.style.minHeight = "";
      root.addEventListener("keydown", event => this.key(event));
      new ResizeObserver(() => this.draw()).observe(this.box);
      this.go(0);
    }

    button(label, name, action) {
      return element("button", {type: "button", "aria-label": name, title: name, onclick: action}, label);
    }

    bar() {
      const choice = (name, values, chosen, changed) => element("label", {}, `${name} `, element(
        "select", {onchange: event => changed(event.target.value)},
        ...Object.keys(values).map(value => element("option", {value, ...(value === chosen ? {selected: ""} : {})}, value))));
      this.playing = this.button("▶", "Play", () => this.toggle());
      this.clock = element("output", {class: "ranks-clock"});
      this.range = element("input", {type: "range", min: 0, max: 1, step: "any", "aria-label": "Time", class: "ranks-range",
        oninput: () => { this.stop(); this.go(this.story.moment(Number(this.range.value))); }});
      this.speed = 1;
      return element("div", {class: "ranks-bar"},
        this.button("|◂", "To the beginning", () => this.jump(-Infinity)), this.button("◂", "One event back", () => this.step(-1)),
        this.playing, this.button("▸", "One event on", () => this.step(1)), this.button("▸|", "To the end", () => this.jump(Infinity)),
        this.range, this.clock, choice("speed", SPEEDS, "1", value => { this.speed = SPEEDS[value]; }),
        choice("zoom", {1: 1, 2: 2, 4: 4, 8: 8}, "1", value => { this.zoom = Number(value); this.draw(); }));
    }

    lanes() {
      const {story} = this;
      this.follow = story.ranks.map((_, rank) => element("button", {type: "button", class: `ranks-chip ranks-${rank}`,
        "aria-label": `Follow rank ${rank} in the code`, title: `Follow rank ${rank} in the code`,
        onclick: () => { this.followed = rank; this.go(this.t); }}, String(rank)));
      this.box = element("div", {class: "ranks-box", tabindex: 0, role: "group", "aria-label": `Lanes of ${story.ranks.length} ranks, time to the right`});
      const seek = event => {
        const {left, width} = this.svg.getBoundingClientRect();
        this.stop();
        this.go(story.moment(Math.min(1, Math.max(0, (event.clientX - left) / width))));
      };
      this.box.addEventListener("pointerdown", event => { if (event.button === 0 && event.pointerType === "mouse") seek(event); });
      this.box.addEventListener("pointermove", event => { if (event.buttons === 1 && event.pointerType === "mouse") seek(event); });
      this.box.addEventListener("click", seek);
      const kinds = Object.entries(KINDS).filter(([kind]) => !kind || story.paint.some(one => one[2] === kind));
      const legend = element("p", {class: "ranks-legend"},
        ...kinds.map(([kind, name]) => element("span", {}, element("i", {class: `ranks-key ranks-key-${kind || "plain"}`}), name)),
        element("span", {}, element("i", {class: "ranks-key ranks-key-wait"}), "waits"),
        element("span", {}, element("i", {class: "ranks-key ranks-key-call"}), "call, all ranks there"),
        element("span", {}, element("i", {class: "ranks-key ranks-key-held"}), `memory, up to ${bytes(story.most)}`),
        ...(story.breaks.length ? [element("span", {}, "// time left out")] : []));
      return element("div", {class: "ranks-lanes"},
        element("div", {class: "ranks-labels"}, ...this.follow), this.box, legend);
    }

    below() {
      const {story} = this;
      this.marks = new Map();
      const sections = story.code.map((part, place) => element("div", {class: "ranks-section"},
        element("div", {class: "ranks-name"}, element("b", {}, part.name), ` ${part.file}`),
        ...part.lines.map((text, i) => {
          const here = element("span", {class: "ranks-here"}), code = element("code", {});
          if (part.html) code.innerHTML = part.html[i] || " "; else code.textContent = text || " ";
          const row = element("div", {class: "ranks-line", "data-line": part.first + i}, here,
            element("span", {class: "ranks-number", "aria-hidden": "true"}, String(part.first + i)), code);
          this.marks.set(`${place}:${part.first + i}`, {row, here});
          return row;
        })));
      this.code = element("div", {class: "ranks-code highlight", tabindex: 0, role: "group", "aria-label": "The code that runs"}, ...sections);
      this.cards = story.ranks.map((_, rank) => {
        const said = element("p", {class: "ranks-said"}), source = element("code", {class: "ranks-source"});
        const values = element("dl", {class: "ranks-values"});
        const card = element("div", {class: `ranks-card ranks-${rank}`, role: "group", "aria-label": `Rank ${rank}`},
          element("p", {class: "ranks-head"}, element("b", {class: `ranks-chip ranks-${rank}`}, `rank ${rank}`), said), source, values);
        return {card, said, source, values};
      });
      this.live = element("p", {class: "ranks-live", role: "status"});
      const table = element("details", {class: "ranks-table"}, element("summary", {}, "All events as a table"));
      table.addEventListener("toggle", () => { if (table.open && !table.querySelector("table")) table.append(this.table()); });
      return element("div", {class: "ranks-below"}, element("div", {class: "ranks-beside"}, this.code),
        element("div", {class: "ranks-cards"}, ...this.cards.map(one => one.card)), this.live,
        element("p", {class: "ranks-keys"}, "Keys: ", element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " event by event, with ",
          element("kbd", {}, "Shift"), " those of the followed rank; ", element("kbd", {}, "Page ↑"), " ", element("kbd", {}, "Page ↓"),
          " call by call; ", element("kbd", {}, "Home"), " ", element("kbd", {}, "End"), "; ", element("kbd", {}, "Space"), " plays."), table);
    }

    table() {
      const rows = this.story.events.map(([at, rank, kind, what]) => {
        const text = kind === "line" ? (what[1] < 0 ? "leaves the code shown" : `line ${what[2]}: ${this.story.source(what)}`)
          : kind === "end" ? this.story.doing(rank, what.at)
            : `${what[2]} of ${bytes(what[3])} with ${ranks(what[5].filter(other => other !== rank))} ${kind === "call" ? "begins" : "ends"}`;
        return element("tr", {}, element("td", {}, time(at)), element("td", {}, String(rank)), element("td", {}, text));
      });
      const head = element("tr", {}, ...["time", "rank", "event"].map(name => element("th", {scope: "col"}, name)));
      return element("div", {class: "ranks-scroll", tabindex: 0, role: "group", "aria-label": "All events"},
        element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    }

    /* --- the drawing --- */

    draw() {
      const {story} = this, width = Math.max(260, this.box.clientWidth) * this.zoom;
      if (width === this.width) return;
      this.width = width;
      const x = t => story.place(t) * (width - 12) + 2;  // room for what stands at the end
      const height = LINES + CALLS + HELD + GAP, top = rank => AXIS + rank * height;
      const whole = AXIS + story.ranks.length * height;
      this.svg = drawn("svg", {width, height: whole, viewBox: `0 0 ${width} ${whole}`, "aria-hidden": "true"});
      this.x = x;
      const hatch = drawn("pattern", {id: `hatch-${story.name}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"});
      hatch.append(drawn("rect", {width: 5, height: 5, class: "ranks-hatch-ground"}), drawn("rect", {width: 1.6, height: 5, class: "ranks-hatch"}));
      const tip = drawn("marker", {id: `tip-${story.name}`, viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto"});
      tip.append(drawn("path", {d: "M0 0 6 3 0 6z", class: "ranks-tip"}));
      const defs = drawn("defs");
      defs.append(hatch, tip);
      this.svg.append(defs);
      const block = (from, to, y, high, kind, title) => this.svg.append(drawn("rect", {
        x: x(from), y, width: Math.max(0.6, x(to) - x(from)), height: high, class: kind, ...(kind === "ranks-wait" ? {fill: `url(#hatch-${story.name})`} : {})}, title));
      this.axis(x, whole);
      story.ranks.forEach((lane, rank) => {
        const y = top(rank);
        this.svg.append(drawn("rect", {x: x(0), y, width: x(lane.end.at) - x(0), height: height - GAP, class: "ranks-lane", rx: 2}));
        lane.lines.forEach((line, i) => {
          const until = lane.lines[i + 1]?.[0] ?? lane.end.at;
          if (line[1] >= 0) block(line[0], until, y, LINES, `ranks-block ranks-block-${story.painted.get(`${line[1]}:${line[2]}`) ?? "plain"}`, `rank ${rank}, line ${line[2]}: ${story.source(line)}\n${time(until - line[0])}`);
        });
        for (const [from, to] of lane.waits) block(from, to ?? lane.end.at, y, LINES, "ranks-wait", `rank ${rank} stands still: ${time((to ?? lane.end.at) - from)}`);
        for (const call of lane.calls) {
          const end = call[1] ?? lane.end.at, title = `rank ${rank}: ${call[2]}, ${bytes(call[3])}, with ${ranks(call[5].filter(other => other !== rank))}\n${call[1] === null ? "never ended" : time(end - call[0])}`;
          const came = this.story.missing(call, Infinity).length || call.fits === false ? end : Math.min(end, Math.max(call[0], ...call.others.map(other => other[0])));
          if (came > call[0]) block(call[0], came, y + LINES + 1, CALLS - 2, "ranks-wait", title);
          block(came, end, y + LINES + 1, CALLS - 2, "ranks-call", title);
        }
        this.held(lane, x, y + LINES + CALLS, HELD - 1);
        if (lane.end.how !== "returned") this.stopped(x(lane.end.at), y + LINES / 2, lane, rank);
      });
      this.links(x, rank => top(rank) + LINES + CALLS / 2);
      this.now = drawn("line", {y1: AXIS - 6, y2: whole - GAP / 2, class: "ranks-now"});
      this.svg.append(this.now);
      this.box.replaceChildren(this.svg);
      this.go(this.t);
    }

    axis(x, whole) {
      const {story} = this, steps = [1, 2, 5].flatMap(one => [...Array(8).keys()].map(power => one * 10 ** power)).sort((one, other) => one - other);
      const linear = story.until - story.breaks.reduce((sum, [from, to]) => sum + to - from, 0);
      const step = steps.find(one => one > 90 * linear / this.width) ?? story.until;
      for (let t = 0; t <= story.until; t += step) {
        if (story.breaks.some(([from, to]) => t > from && t < to)) continue;
        this.svg.append(drawn("line", {x1: x(t), x2: x(t), y1: AXIS - 5, y2: whole - GAP, class: "ranks-tick"}));
        if (x(t) > this.width - 60) continue;
        const label = drawn("text", {x: x(t) + 2, y: AXIS - 8, class: "ranks-axis"});
        label.textContent = t ? `${+(t / 1000).toFixed(2)} ms` : "0";
        this.svg.append(label);
      }
      for (const [from, to] of story.breaks) {
        const middle = (x(from) + x(to)) / 2, label = drawn("text", {x: middle, y: AXIS - 8, class: "ranks-axis ranks-break"});
        label.textContent = `// ${time(to - from)} //`;
        this.svg.append(drawn("line", {x1: middle, x2: middle, y1: AXIS - 4, y2: whole - GAP, class: "ranks-cut"}), label);
      }
    }

    held(lane, x, y, high) {
      const {story} = this, points = lane.held, at = value => y + high - 1 - value / story.most * (high - 3);
      if (!points.length) return;
      let path = `M${x(points[0][0])} ${y + high}V${at(points[0][1])}`;
      for (const [t, value] of points.slice(1)) path += `H${x(Math.min(t, lane.end.at)).toFixed(1)}V${at(value).toFixed(1)}`;
      this.svg.append(drawn("path", {d: `${path}H${x(lane.end.at)}V${y + high}z`, class: "ranks-held"}));
    }

    stopped(x, y, lane, rank) {
      this.svg.append(drawn("path", {d: `M${x - 5} ${y - 5}l10 10m0 -10l-10 10`, class: "ranks-stop"}, `rank ${rank} ${this.story.doing(rank, lane.end.at)}`));
      const waited = lane.end.waits_for;
      [lane.end.how, waited.length ? `waits for ${ranks(waited)}` : ""].forEach((text, i) => {
        const label = drawn("text", {x: x - 10, y: y + 4 + i * (LINES + CALLS) / 2, class: "ranks-never"});
        label.textContent = text;
        this.svg.append(label);
      });
    }

    links(x, y) {
      this.arrows = [];
      for (const link of this.story.links) {
        const calls = link.of.map(([rank, place]) => this.story.ranks[rank].calls[place]);
        const end = call => call[1] ?? this.story.ranks[call.rank].end.at;
        const begins = Math.min(...calls.map(call => call[0])), ends = Math.max(...calls.map(end));
        let shown;
        if (calls[0][2] === "send") {
          const [send, receive] = calls;
          shown = drawn("path", {d: `M${x(send[0])} ${y(send.rank)}L${x(end(receive))} ${y(receive.rank)}`, class: "ranks-arrow", "marker-end": `url(#tip-${this.story.name})`},
            `${bytes(send[3])} from rank ${send.rank} to rank ${receive.rank}`);
        } else {
          const came = Math.max(...calls.map(call => call[0])), among = calls.map(call => y(call.rank));
          shown = drawn("path", {d: `M${x(came)} ${Math.min(...among)}V${Math.max(...among)}` + calls.map(call => `M${x(came) - 1.6} ${y(call.rank)}a1.6 1.6 0 1 0 3.2 0a1.6 1.6 0 1 0 -3.2 0`).join(""),
            class: `ranks-arrow${link.fits ? "" : " ranks-unfit"}`}, `${calls[0][2]} of ${bytes(calls[0][3])}: ${ranks(calls.map(call => call.rank))}`);
        }
        this.svg.append(shown);
        this.arrows.push({shown, begins, ends});
      }
      for (const lane of this.story.ranks) {  // messages that nobody receives
        for (const call of lane.calls.filter(one => one[1] === null && ["send", "recv"].includes(one[2]) && !one.others.length)) {
          this.svg.append(drawn("path", {d: `M${x(call[0])} ${y(call.rank)}L${(x(call[0]) + x(lane.end.at)) / 2} ${y(call[5][1])}`, class: "ranks-arrow ranks-unfit",
            "marker-end": `url(#tip-${this.story.name})`}, `rank ${call.rank}'s ${call[2]}, for which rank ${call[5][1]} never came`));
        }
      }
    }

    /* --- time --- */

    go(t) {
      const {story} = this;
      this.t = Math.min(story.until, Math.max(0, t));
      const place = story.place(this.t), said = story.ranks.map((_, rank) => story.doing(rank, this.t));
      this.range.value = place;
      this.range.setAttribute("aria-valuetext", time(this.t));
      this.clock.textContent = `${time(this.t)} of ${time(story.until)}`;
      if (this.now) {
        const x = this.x(this.t), {scrollLeft, clientWidth} = this.box;
        this.now.setAttribute("x1", x);
        this.now.setAttribute("x2", x);
        if (this.zoom > 1 && (x < scrollLeft + 20 || x > scrollLeft + clientWidth - 40)) this.box.scrollLeft = x - clientWidth / 3;
        for (const {shown, begins, ends} of this.arrows) shown.classList.toggle("ranks-active", begins <= this.t && this.t <= ends);
      }
      for (const {row, here} of this.marked ?? []) { row.classList.remove("ranks-on"); row.style.removeProperty("--here"); here.replaceChildren(); }
      this.marked = [];
      story.ranks.forEach((lane, rank) => {
        const {card, said: words, source, values} = this.cards[rank], line = story.line(rank, this.t);
        const mark = line && this.marks.get(`${line[1]}:${line[2]}`);
        if (mark) {
          this.marked.push(mark);
          mark.row.classList.add("ranks-on");
          mark.row.style.setProperty("--here", `var(--rank-${rank === this.followed || mark.here.childElementCount === 0 ? rank : "many"})`);
          mark.here.append(element("b", {class: `ranks-chip ranks-${rank}`}, String(rank)));
          if (rank === this.followed) this.show(mark.row);
        }
        this.follow[rank].setAttribute("aria-pressed", rank === this.followed);
        words.textContent = said[rank];
        source.textContent = line ? story.source(line) : "";
        card.classList.toggle("ranks-waits", story.isWaiting(rank, this.t) && this.t < lane.end.at);
        card.classList.toggle("ranks-stopped", this.t >= lane.end.at && lane.end.how !== "returned");
        const known = story.variables.map((name, at) => [name, last(lane.values.filter(value => value[1] === at), this.t)?.[2] ?? "–"]);
        values.replaceChildren(...[...known, ["memory", bytes(last(lane.held, this.t)?.[1] ?? 0)]]
          .flatMap(([name, text]) => [element("dt", {}, name), element("dd", {title: text}, text)]));
      });
      this.live.setAttribute("aria-live", this.frame ? "off" : "polite");  // silent while it plays
      this.live.textContent = `${time(this.t)}: ${said.map((words, rank) => `rank ${rank} ${words}`).join("; ")}.`;
    }

    /* Bring a line into the code's own box, and leave the page where it is. */
    show(row) {
      const {code} = this, above = row.offsetTop;  // the box is what offsets are counted from
      if (above < code.scrollTop + 20 || above + row.offsetHeight > code.scrollTop + code.clientHeight - 20) {
        code.scrollTop = above - code.clientHeight / 3;
      }
    }

    /* To the next or previous time at which something of a choice happens. */
    step(direction, wanted = () => true) {
      this.stop();
      const {events} = this.story;
      const next = direction > 0 ? events.find(one => one[0] > this.t && wanted(one)) : events.findLast(one => one[0] < this.t && wanted(one));
      this.go(next ? next[0] : direction > 0 ? this.story.until : 0);
    }

    jump(t) { this.stop(); this.go(t); }

    key(event) {
      const tag = event.target.tagName;
      if (tag === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
      const isCall = one => one[2] === "call", isFollowed = one => one[1] === this.followed;
      const act = {ArrowLeft: () => this.step(-1, event.shiftKey ? isFollowed : undefined), ArrowRight: () => this.step(1, event.shiftKey ? isFollowed : undefined),
        PageUp: () => this.step(-1, isCall), PageDown: () => this.step(1, isCall), Home: () => this.jump(0), End: () => this.jump(Infinity),
        ...(tag === "BUTTON" || tag === "SUMMARY" ? {} : {" ": () => this.toggle()})}[event.key];
      if (act && !event.target.closest(".ranks-scroll")) { event.preventDefault(); act(); }
    }

    toggle() {
      if (this.frame) { this.stop(); this.go(this.t); return; }
      if (this.t >= this.story.until) this.go(0);
      this.playing.textContent = "⏸";
      this.playing.setAttribute("aria-label", "Pause");
      let before = performance.now(), since = 0;
      const tick = now => {
        const passed = (now - before) / 1000 * this.speed;
        before = now;
        this.frame = requestAnimationFrame(tick);
        if (still.matches) {  // from event to event, without a glide
          if ((since += passed) < 0.5) return;
          since = 0;
          this.go(this.story.events.find(one => one[0] > this.t)?.[0] ?? this.story.until);
        } else {
          this.go(this.story.moment(this.story.place(this.t) + passed / WHOLE_SECONDS));
        }
        if (this.t >= this.story.until) { this.stop(); this.go(this.t); }
      };
      this.frame = requestAnimationFrame(tick);
    }

    stop() {
      cancelAnimationFrame(this.frame);
      this.frame = 0;
      this.playing.textContent = "▶";
      this.playing.setAttribute("aria-label", "Play");
    }
  }

  /* A player's recording is fetched when it comes near the window, or its button is pressed. */
  const open = root => {
    if (root.dataset.opened) return;
    root.dataset.opened = "yes";
    (waitingFor[root.dataset.name] ??= []).push(recording => { root.player = new Player(root, recording); });
    const script = element("script", {src: root.dataset.source});
    script.onerror = () => { root.dataset.opened = ""; root.querySelector("p").append(" (its recording cannot be loaded)"); };
    document.head.append(script);
  };
  document.addEventListener("DOMContentLoaded", () => {
    const near = new IntersectionObserver(entries => entries.filter(one => one.isIntersecting).forEach(one => { near.unobserve(one.target); open(one.target); }), {rootMargin: "400px"});
    for (const root of document.querySelectorAll(".ranks")) {
      near.observe(root);
      root.querySelector("button")?.addEventListener("click", () => open(root));
    }
  });
})();
