/* The schedule bench: controls, the drawing, and actions that can be moved, by pointer or by keyboard. */
(() => {
const place = document.getElementById("bench");
const field = (name) => place.querySelector(`[name=${name}]`);
const said = place.querySelector(".bench-said");
const drawing = place.querySelector(".bench-drawing");
const LANE = 30, LABEL = 58, WIDTH = 900;
const KINDS = { F: "forward", B: "backward, whole", I: "backward: gradient of the input", W: "backward: gradient of the weights" };
let python = null, now = null, chosen = null;

function wanted() {
  const numbers = ["ranks", "microbatches", "stages", "forward", "input", "weight", "message"];
  return JSON.stringify({ name: field("name").value, ...Object.fromEntries(numbers.map((name) => [name, Number(field(name).value)])) });
}

function begin(own, names) {
  python = own;
  for (const name of Object.keys(names)) field("name").add(new Option(name));
  field("name").value = "1f1b";
  field("name").addEventListener("change", () => { field("stages").disabled = !names[field("name").value]; });
  field("stages").disabled = true;
  for (const control of place.querySelectorAll("select, input")) control.addEventListener("change", make);
  make();
}

async function make() {
  show(await python.ask("made", wanted()));
}

/* A table that cannot run keeps its drawing, so that the move can be taken back; the sentence says why. */
function show(answer) {
  place.classList.toggle("bench-wrong", Boolean(answer.error));
  if (answer.error) {
    said.textContent = answer.error;
    return;
  }
  now = answer;
  said.textContent = `step ${Number(answer.step.toPrecision(4))} · idle ${(100 * answer.bubble).toFixed(1)} % · ` +
    `held at most, per rank: ${answer.peaks.map((peak) => Number(peak.toPrecision(3))).join(", ")} micro-batches`;
  draw();
}

function draw() {
  const unit = (WIDTH - LABEL) / now.step;
  const height = now.rows.length * LANE;
  const parts = [];
  now.rows.forEach((row, rank) => {
    parts.push(`<text class="bench-rank" x="0" y="${rank * LANE + 19}">rank ${rank}</text>` +
      `<rect class="run-lane" x="${LABEL}" y="${rank * LANE}" width="${WIDTH - LABEL}" height="${LANE - 4}"/>`);
    row.forEach((one, at) => {
      const x = LABEL + one.start * unit, width = Math.max((one.end - one.start) * unit - .8, 1);
      parts.push(`<g class="run-${one.kind}" data-rank="${rank}" data-at="${at}" role="button" tabindex="-1" ` +
        `aria-label="micro-batch ${one.microbatch}: ${one.name}, rank ${rank}, place ${at + 1} of ${row.length}"><rect x="${x}" y="${rank * LANE}" ` +
        `width="${width}" height="${LANE - 4}"/>${width > 9 ? `<text x="${x + width / 2}" y="${rank * LANE + 17}">` +
        `${one.microbatch}</text>` : ""}</g>`);
    });
  });
  drawing.innerHTML = `<svg viewBox="0 0 ${WIDTH} ${height}" role="group" aria-label="The table, a lane per rank">` +
    `${parts.join("")}</svg>`;
  const shown = new Set(now.rows.flat().map((one) => one.kind));
  const listed = Object.fromEntries(Object.entries(KINDS).filter(([kind]) => shown.has(kind)).map(([kind, text]) => [`run-${kind}`, text]));
  place.querySelector(".bench-legend").innerHTML = live.legend({ ...listed, lane: "idle" }) +
    "<p>A row is a rank, from left to right is time; the number in a block is its micro-batch.</p>";
  focusable(chosen ?? { rank: 0, at: 0 }, chosen !== null);
}

function blockAt({ rank, at }) {
  return drawing.querySelector(`[data-rank="${rank}"][data-at="${at}"]`);
}

function placeOf(block) {
  return { rank: Number(block.dataset.rank), at: Number(block.dataset.at) };
}

function focusable(where, focus) {
  const block = blockAt(where) ?? blockAt({ rank: 0, at: 0 });
  for (const other of drawing.querySelectorAll("[tabindex='0']")) other.setAttribute("tabindex", "-1");
  block.setAttribute("tabindex", "0");
  if (focus) block.focus({ preventScroll: true });
}

async function move(where, to) {
  const row = now.rows[where.rank];
  if (to < 0 || to >= row.length || to === where.at) return;
  const answer = await python.ask("moved", now.table, wanted(), where.rank, where.at, to);
  if (!answer.error) chosen = { rank: where.rank, at: to };
  show(answer);
}

drawing.addEventListener("keydown", (event) => {
  const block = event.target.closest("g[data-rank]");
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!block || !step) return;
  event.preventDefault();
  const where = placeOf(block);
  if (event.shiftKey && step[1]) { move(where, where.at + step[1]); return; }
  const next = { rank: where.rank + step[0], at: where.at + step[1] };
  if (blockAt(next)) { chosen = next; focusable(next, true); }
});

let dragged = null;
drawing.addEventListener("pointerdown", (event) => {
  dragged = event.target.closest("g[data-rank]");
  dragged?.classList.add("bench-dragged");
  if (dragged) { event.preventDefault(); dragged.focus({ preventScroll: true }); }
});
addEventListener("pointerup", (event) => {
  if (!dragged) return;
  const where = placeOf(dragged);
  dragged.classList.remove("bench-dragged");
  dragged = null;
  const box = drawing.querySelector("svg").getBoundingClientRect();
  const time = ((event.clientX - box.left) / box.width * WIDTH - LABEL) / ((WIDTH - LABEL) / now.step);
  const others = now.rows[where.rank].filter((_, at) => at !== where.at);
  const to = others.filter((one) => (one.start + one.end) / 2 < time).length;
  chosen = where;
  move(where, to);
});

function save(name, kind, text) {
  const link = Object.assign(document.createElement("a"), { download: name, href: URL.createObjectURL(new Blob([text], { type: kind })) });
  link.click();
  URL.revokeObjectURL(link.href);
}

field("csv").addEventListener("click", () => save(`${field("name").value}.csv`, "text/csv", now.table));
field("svg").addEventListener("click", () => {
  const copy = drawing.querySelector("svg").cloneNode(true);
  const colours = getComputedStyle(document.documentElement);
  const style = ["F", "B", "I", "W"].map((kind) => `.run-${kind} rect{fill:${colours.getPropertyValue(`--run-${kind}`)}}`).join("");
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.insertAdjacentHTML("afterbegin", `<style>text{font:12px sans-serif}g text{text-anchor:middle}.run-lane{fill:#ddd}${style}</style>`);
  save(`${field("name").value}.svg`, "image/svg+xml", copy.outerHTML);
});

live.part(place, "schedule", "names", begin);
})();
