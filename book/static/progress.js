/* The page "My progress", from what questions.js keeps in this browser and the list of the course's lessons. */
(() => {
"use strict";
const {lessons, exercises} = window.courseContents, store = window.courseStore, {make} = store;
const known = new Map(exercises.map(exercise => [exercise.name, exercise]));
const page = document.getElementById("progress");
const said = make("p", {class: "progress-said", role: "status"});
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/* --- files: what `course check --json` prints, and what this page exports */
const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
const isResult = value => isObject(value) && Object.keys(value).sort().join() === "of,points,when"
  && Number.isInteger(value.points) && Number.isInteger(value.of) && 0 <= value.points && value.points <= value.of
  && !Number.isNaN(Date.parse(value.when));

function problemOf(results) {
  if (!isObject(results) || !Object.keys(results).length) return "it holds no results";
  const stranger = Object.keys(results).find(name => !known.has(name));
  if (stranger !== undefined) return `the course has no exercise “${stranger}”`;
  const wrong = Object.keys(results).find(name => !isResult(results[name]));
  return wrong === undefined ? "" : `“${wrong}” has no points, of how many, and when`;
}

function isExport(content) {
  return isObject(content) && Object.keys(content).sort().join() === "answers,course,places,results" && content.course === 1
    && isObject(content.answers) && Object.values(content.answers).every(
      answers => isObject(answers) && Object.values(answers).every(answer => isObject(answer) && answer.when))
    && isObject(content.places) && Object.values(content.places).every(isObject)
    && isObject(content.results) && Object.values(content.results).every(isResult);
}

/* The newer of two entries stays. */
function merge(into, from) {
  for (const [name, entry] of Object.entries(from)) {
    if (!(Date.parse(into[name]?.when) > Date.parse(entry.when))) into[name] = entry;
  }
}

async function take(file) {
  let content;
  try { content = JSON.parse(await file.text()); } catch { content = undefined; }
  if (isExport(content)) {
    store.change("places", places => merge(places, content.places));
    store.change("results", results => merge(results, content.results));
    store.change("answers", answers => {
      for (const [lesson, of] of Object.entries(content.answers)) merge(answers[lesson] ??= {}, of);
    });
    return `${file.name} is read: answers, points and places.`;
  }
  const problem = content === undefined ? "it is not JSON" : problemOf(content);
  if (problem) return `${file.name} is not what “course check --json” prints, nor an export of this page: ${problem}.`;
  store.change("results", results => merge(results, content));
  return `${file.name} is read: ${plural(Object.keys(content).length, "exercise")}.`;
}

function save() {
  const content = {course: 1};
  for (const name of ["answers", "results", "places"]) content[name] = store.read(name);
  const address = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], {type: "application/json"}));
  make("a", {href: address, download: "my-progress.json"}).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function forget() {
  if (!confirm("Forget all answers, points and places that this browser keeps of the course?")) return;
  for (const name of ["answers", "results", "places", "shown"]) store.forget(name);
  said.textContent = "All is forgotten.";
  draw();
}

/* --- what the page shows */
function draw() {
  const answers = store.read("answers"), results = store.read("results"), places = store.read("places");
  const rows = lessons.map(lesson => ({
    ...lesson, place: places[lesson.lesson], tasks: exercises.filter(one => one.lesson === lesson.lesson),
    given: lesson.questions.map(one => ({...one, answer: answers[lesson.lesson]?.[one.name]})),
  }));
  const last = rows.filter(row => row.place).sort((a, b) => Date.parse(b.place.when) - Date.parse(a.place.when))[0];
  const counted = rows.flatMap(row => row.given).filter(one => one.answer && "value" in one.answer);
  const points = exercises.reduce((sum, one) => sum + (results[one.name]?.points ?? 0), 0);
  page.replaceChildren(
    make("p", {class: "progress-whole"}, `${counted.length} of ${rows.flatMap(row => row.given).length} questions answered, `
      + `${counted.filter(one => one.answer.close).length} close; ${points} of `
      + `${exercises.reduce((sum, one) => sum + one.points, 0)} points in the exercises.`),
    last ? make("p", {}, "Where you left: ", link(last.lesson, last.place.id, last.title
      + (last.place.title ? ` — ${last.place.title}` : ""))) : make("p", {}, "Begin with ",
      link(lessons[0].lesson, "", lessons[0].title)),
    make("ol", {class: "progress-lessons"}, ...rows.map(row => card(row, results))), files(), said);
}

const link = (lesson, id, words, folder = "notebooks") =>
  make("a", {href: `../${folder}/${lesson}.html${id ? `#${id}` : ""}`}, words);

function card({lesson, title, place, given, tasks}, results) {
  const answered = given.filter(one => one.answer && "value" in one.answer);
  const close = answered.filter(one => one.answer.close).length;
  const points = tasks.reduce((sum, one) => sum + (results[one.name]?.points ?? 0), 0);
  const whole = tasks.reduce((sum, one) => sum + one.points, 0);
  return make("li", {}, make("h2", {}, link(lesson, "", title)),
    make("p", {class: "progress-facts"},
      given.length ? fact(`${answered.length} of ${plural(given.length, "question")}`, answered.length / given.length)
        : null,
      answered.length ? make("span", {}, `${close} close`) : null,
      whole ? fact(`${points} of ${plural(whole, "point")}`, points / whole) : null,
      place?.id ? link(lesson, place.id, `Go on at ${place.title}`) : null),
    details(lesson, answered, tasks.filter(one => one.name in results), results));
}

const fact = (words, share) => make("span", {class: "progress-fact"},
  make("span", {class: "progress-bar", "aria-hidden": "true", style: `--share: ${share}`}), words);

function details(lesson, answered, checked, results) {
  if (!answered.length && !checked.length) return null;
  const answers = answered.map(({id, ask, answer}) => make("li", {}, link(lesson, id, ask),
    make("span", {class: "progress-answer"}, `You: ${answer.shown ?? answer.value}`
      + (answer.found ? `; found: ${answer.found} ` : ""),
    answer.close ? make("span", {class: "question-close"}, "✓ close") : null)));
  const points = checked.map(({name, title}) => make("li", {}, link(lesson, "", title, "exercises"), " ",
    make("code", {}, name), ` ${results[name].points} of ${plural(results[name].of, "point")}`));
  return make("details", {}, make("summary", {}, "Answers and exercises"), make("ul", {}, ...answers, ...points));
}

function files() {
  const file = make("input", {type: "file", accept: ".json,application/json", id: "progress-file", onchange: async event => {
    const [chosen] = event.target.files;
    if (!chosen) return;
    const words = await take(chosen);
    draw();
    said.textContent = words;
  }});
  return make("section", {class: "progress-files"}, make("h2", {}, "Points and files"),
    make("p", {}, "Points come from the check of your exercises:"),
    make("pre", {tabindex: 0}, "course check 02_data_parallel.ipynb --json > results.json"),
    make("p", {}, make("label", {for: "progress-file"}, "Read such a file, or one exported here"), file),
    make("p", {class: "progress-buttons"}, make("button", {type: "button", onclick: save}, "Export as a file"),
      make("button", {type: "button", onclick: forget}, "Forget everything")),
    store.lasts ? null : make("p", {}, "This browser keeps nothing for this page."));
}

draw();
addEventListener("storage", draw);
})();
