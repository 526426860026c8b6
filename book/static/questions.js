/* The lessons' questions: asked first; the author's answer and the measured one come after the reader's.
   book/questions.py writes the questions and what waits for them. All is kept in this browser, under "course:". */
(() => {
"use strict";

/* --- what is kept: answers {lesson: {question: {value, when, measured, close, shown, found} or {skipped, when}}},
   results {exercise: {points, of, when}}, places {lesson: {id, title, when}}, shown {lesson: true} */
const inMemory = new Map();  // where the browser keeps nothing for pages, as it may for those opened from a file
const store = {
  lasts: true,
  read(name) {
    let content = null;
    try { content = JSON.parse(localStorage.getItem(`course:${name}`)); } catch { /* no storage, or not ours */ }
    return content ?? inMemory.get(name) ?? {};
  },
  change(name, edit) {
    const content = store.read(name);
    edit(content);
    try { localStorage.setItem(`course:${name}`, JSON.stringify(content)); } catch {
      inMemory.set(name, content);
      store.lasts = false;
    }
  },
  forget(name) {
    inMemory.delete(name);
    try { localStorage.removeItem(`course:${name}`); } catch { /* nothing was kept */ }
  },
  now: () => new Date().toISOString().replace(/\.\d+Z$/, "+00:00"),
};

/* An element with attributes and children; texts are never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== null));
  return element;
}

/* --- numbers, as course_lib/lessons/questions.py and boxes.py read, write and compare them */
function parsed(text, unit) {
  text = text.replace(/[_\s]/g, "").replace(/−/g, "-");
  if (unit.startsWith("%")) text = text.replace(/%$/, "");
  const thousands = /^[+-]?\d{1,3}(,\d{3})+(\.\d*)?%?$/.test(text) && !text.startsWith("0,");
  const found = text.replace(/,/g, thousands ? "" : ".").match(/^([^/%]+)(?:\/([^/%]+))?(%?)$/);
  if (!found) return NaN;
  const number = part => /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(part) ? Number(part) : NaN;
  const value = number(found[1]) / (found[2] === undefined ? 1 : number(found[2])) / (found[3] ? 100 : 1);
  return Number.isFinite(value) ? value : NaN;
}

function written(value) {
  if (Math.abs(value) >= 1000 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  const short = Number(value.toPrecision(3));
  return Math.abs(short) < 1e-4 ? short.toExponential() : String(short);
}

function withUnit(value, unit) {
  const [first, ...rest] = unit.split(" ");
  const one = written(value) === "1" && first !== "times" && /^[a-z-]{2,}[^s]s$/.test(first);
  return `${written(value)} ${one ? [first.slice(0, -1), ...rest].join(" ") : unit}`.trim();
}

const isClose = (answer, value) => Math.abs(answer - value) <= Math.max(0.1 * Math.abs(value), 1e-6) * (1 + 1e-9);

function howFar(answer, value) {
  if (answer === value) return "exactly that";
  const ratio = answer / value, side = answer > value ? "high" : "low";
  if (value === 0 || ratio <= 0) return `${written(Math.abs(answer - value))} too ${side}`;
  if (ratio >= 2 || ratio <= 0.5) return `${written(Math.max(ratio, 1 / ratio))} times too ${side}`;
  const percent = 100 * Math.abs(ratio - 1);
  return percent < 0.5 ? "less than 1 % off" : `${Math.round(percent)} % too ${side}`;
}

/* --- one question */
const lesson = location.pathname.match(/\/notebooks\/([^/]+?)(\.html)?$/)?.[1];
const entries = () => store.read("answers")[lesson] ?? {};
const allShown = () => Boolean(store.read("shown")[lesson]);
const isOpen = name => allShown() || name in entries();

class Question {
  constructor(element) {
    this.element = element;
    this.data = JSON.parse(element.dataset.question);
    this.words = element.querySelector(".question-ask");
    this.words.id = `${this.data.id}-asks`;
    for (const plain of element.querySelectorAll(".question-choices, .question-author")) plain.remove();
    this.body = make("div", {class: "question-body"});
    element.append(this.body);
    this.draw();
  }

  draw() {
    const entry = entries()[this.data.name], drawn = JSON.stringify([entry, allShown()]);
    if (drawn === this.drawn) return;  // what is being written in a field stays
    this.drawn = drawn;
    this.body.replaceChildren(entry || allShown() ? this.result(entry) : this.form());
  }

  form() {
    const {id, unit, choices} = this.data, asks = this.words.id;
    this.said = make("p", {class: "question-said", role: "alert"});
    let field;
    if (choices.length > 6) {
      field = make("select", {name: "answer", "aria-labelledby": asks}, make("option", {value: ""}, "choose one"),
        ...choices.map(choice => make("option", {}, choice)));
    } else if (choices.length) {
      const long = choices.some(choice => choice.length > 20) ? " question-long" : "";
      field = make("div", {class: `question-radios${long}`, role: "radiogroup", "aria-labelledby": asks},
        ...choices.map(choice =>
          make("label", {}, make("input", {type: "radio", name: "answer", value: choice}), choice)));
    } else {
      field = make("span", {class: "question-number"}, make("input", {
        name: "answer", inputmode: "decimal", autocomplete: "off", size: 10, "aria-labelledby": `${asks} ${id}-unit`}),
        make("span", {id: `${id}-unit`}, unit));
    }
    return make("form", {novalidate: true, onsubmit: event => { event.preventDefault(); this.check(event.target); }},
      field, make("span", {class: "question-buttons"}, make("button", {class: "question-check"}, "Check"),
        make("button", {type: "button", class: "question-link", onclick: () => this.keep({skipped: true})},
          "Show without answering")), this.said);
  }

  check(form) {
    const answer = new FormData(form).get("answer") ?? "", {unit, choices, right, found} = this.data;
    if (choices.length) {
      if (!answer) return this.refuse("Choose one first.");
      return this.keep({value: answer, shown: answer, close: found ? right.includes(answer) : undefined});
    }
    const value = parsed(answer, unit);
    if (Number.isNaN(value)) return this.refuse("Write a number: 12, 0.5, 3/4, 1e9 or 40 %.");
    return this.keep({value, shown: withUnit(value, unit), close: found ? isClose(value, found.value) : undefined});
  }

  refuse(words) {
    this.said.textContent = words;
    this.body.querySelector("[name=answer]").focus();
  }

  keep(entry) {
    const {name, found} = this.data;
    store.change("answers", content => {
      (content[lesson] ??= {})[name] = {...entry, when: store.now(), measured: found?.value, found: found?.shown};
    });
    drawPage();
    this.body.querySelector(".question-result").focus({preventScroll: true});
  }

  again() {
    store.change("answers", content => { delete content[lesson]?.[this.data.name]; });
    drawPage();
    (this.body.querySelector("[name=answer]") ?? this.body.querySelector(".question-result")).focus();
  }

  result(entry) {
    const {choices, author, because, predicted, author_close: authorClose, found} = this.data;
    const answered = entry && "value" in entry;
    const judged = (value, close) => {
      if (!found) return "";
      if (choices.length) return close ? "right" : "not this one";
      return howFar(value, found.value) + (close && value !== found.value ? ": close" : "");
    };
    const row = (kind, who, what, said, close) => make("div", {class: `question-row question-${kind}`},
      make("dt", {}, who), make("dd", {}, make("b", {}, what), said ? make("span", {
        class: `question-far${close ? " question-close" : ""}`}, ` ${close ? "✓ " : ""}${said}`) : null));
    const rows = [
      answered ? row("you", "You", entry.shown, judged(entry.value, entry.close), entry.close) : null,
      row("author", "The author", author, judged(predicted, authorClose), authorClose),
      found ? row("found", found.how[0].toUpperCase() + found.how.slice(1), found.shown, "") : null];
    if (because) rows[1].querySelector("dd").append(make("span", {class: "question-why"}, `“${because}”`));
    return make("div", {class: "question-result", tabindex: -1, "aria-labelledby": this.words.id, role: "group"},
      make("dl", {}, ...rows.filter(Boolean)), entry ? make("button", {
        type: "button", class: "question-link", onclick: () => this.again()}, answered ? "Try again" : "Answer it") : null);
  }
}

/* --- what waits for answers */
function drawWaiting(questions) {
  const byId = new Map(questions.map(question => [question.data.id, question]));
  for (const element of document.querySelectorAll("[data-after]")) {
    const waitsFor = element.dataset.after.split(" ").filter(id => byId.has(id) && !isOpen(byId.get(id).data.name));
    const waiting = waitsFor.length > 0, output = element.closest(".output");
    if (element.matches(".waits")) {
      (output ?? element).hidden = waiting;
    } else if (element.dataset.hides === "cell") {
      element.closest(".cell").hidden = waiting;
    } else {
      for (const other of element.closest(".cell_output").children) {
        if (other !== output && !other.querySelector(".question, .waits")) other.hidden = waiting;
      }
      output.hidden = !waiting;
      element.replaceChildren(...(waiting ? placeholder(waitsFor) : []));
    }
  }
}

function placeholder(ids) {
  const which = ids.length > 1 ? `the ${ids.length} questions above` : "the question above";
  return ["What was found is shown once you have answered ", make("a", {href: `#${ids[0]}`}, which), "."];
}

/* --- the page */
let questions = [], bar;

function drawPage() {
  for (const question of questions) question.draw();
  drawWaiting(questions);
  drawBar();
}

function drawBar() {
  if (!bar) return;
  const answered = questions.filter(question => "value" in (entries()[question.data.name] ?? {})).length;
  bar.querySelector(".questions-count").textContent =
    `${questions.length} question${questions.length > 1 ? "s" : ""} on this page, ${answered} answered.`;
  bar.querySelector("input").checked = allShown();
}

function makeBar(place) {
  bar = make("div", {class: "questions-bar"}, make("span", {class: "questions-count"}),
    make("label", {}, make("input", {type: "checkbox", onchange: event => {
      const {checked} = event.target;
      store.change("shown", content => { if (checked) content[lesson] = true; else delete content[lesson]; });
      drawPage();
    }}), "Show all answers on this page"),
    make("a", {href: "../live/progress.html"}, "My progress"),
    place?.id && !location.hash ? make("a", {href: `#${place.id}`}, `Go on at “${place.title}”`) : null,
    store.lasts ? null : make("span", {}, "This browser keeps nothing: answers are gone when you leave the page."));
  document.querySelector("article h1").after(bar);
}

/* Remembers the last heading that was read; a page that is only opened changes nothing. */
function watchPlaces() {
  let scrolled = false;
  addEventListener("scroll", () => { scrolled = true; }, {once: true, passive: true});
  const watch = new IntersectionObserver(seen => {
    const heading = seen.filter(one => one.isIntersecting).at(-1)?.target;
    if (!heading || !scrolled) return;
    const title = [...heading.childNodes].filter(node => !node.classList?.contains("headerlink"))
      .map(node => node.textContent).join("").trim();
    store.change("places", content => {
      content[lesson] = {id: heading.closest("section").id, title, when: store.now()};
    });
  }, {rootMargin: "0px 0px -50% 0px"});
  for (const heading of document.querySelectorAll("article section > :is(h2, h3)")) watch.observe(heading);
}

window.courseStore = Object.assign(store, {make});
document.documentElement.classList.add("asks");
document.addEventListener("DOMContentLoaded", () => {
  try {
    if (!lesson) return;
    const place = store.read("places")[lesson];
    store.change("places", content => { content[lesson] ??= {id: "", title: "", when: store.now()}; });
    questions = [...document.querySelectorAll(".question[data-question]")].map(element => new Question(element));
    if (questions.length) makeBar(place);
    drawPage();
    watchPlaces();
    addEventListener("storage", drawPage);  // answered in another tab
  } finally {
    document.documentElement.classList.add("asked");
  }
});
})();
