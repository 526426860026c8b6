/* Exercises that are checked in the page: an editor for each, their own checker, and a way to stop it. */
(() => {
  const place = document.getElementById("exercises");
  const kept = (name) => `course:exercise:${name}`;
  const opened = new Promise((begin) => live.part(place, "exercises", "names", begin));
  const open = place.querySelector("[name=open]");

  /* Writing needs no Python; the first check loads it. */
  function set(exercise) {
    const { task } = exercise.dataset, [check, stop, anew] = exercise.querySelectorAll("button");
    const text = exercise.querySelector("textarea"), report = exercise.querySelector(".live-report");
    const first = text.value;
    text.value = localStorage.getItem(kept(task)) ?? first;
    for (const control of [text, check, anew]) control.disabled = false;

    async function run() {
      const every = document.querySelectorAll(".live-exercise [name=check]");
      for (const button of every) button.disabled = true;
      show("Loading Python, at the top of the page …");
      if (!open.disabled) open.click();
      const python = await opened;
      stop.disabled = false;
      stop.onclick = () => python.stop();
      show("Checking …");
      const answer = await python.ask("checked", task, text.value);
      show(answer.stopped ? "Stopped. The next check starts Python anew."
        : answer.error ?? `${answer.printed ? `${answer.printed.trimEnd()}\n\n` : ""}${answer.report}`);
      report.classList.toggle("live-right", answer.points !== undefined && answer.points === answer.of);
      report.classList.toggle("live-wrong", Boolean(answer.error));
      for (const button of every) button.disabled = false;
      stop.disabled = true;
    }

    /* Sentences are broken at the edge, rows of a drawn table are not. */
    function show(said) {
      report.hidden = false;
      report.innerHTML = said.split("\n").map((line) =>
        `<div${/^ *rank \d+ +/.test(line) ? ' class="live-row"' : ""}>${live.escaped(line) || " "}</div>`).join("");
    }

    check.addEventListener("click", run);
    anew.addEventListener("click", () => { text.value = first; localStorage.removeItem(kept(task)); });
    text.addEventListener("input", () => localStorage.setItem(kept(task), text.value));
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) { if (!check.disabled) run(); return; }
      const line = text.value.slice(0, text.selectionStart).split("\n").pop(); // the next is indented like it, or deeper
      const indent = line.match(/^ */)[0] + (line.trimEnd().endsWith(":") ? "    " : "");
      text.setRangeText(`\n${indent}`, text.selectionStart, text.selectionEnd, "end");
      text.dispatchEvent(new Event("input"));
    });
  }

  if (!open.disabled) document.querySelectorAll(".live-exercise").forEach(set);
})();
