/* Exercises that are checked in the page: an editor for each, their own checker, and a way to stop it. */
(() => {
  const place = document.getElementById("exercises");
  const kept = (name) => `course:exercise:${name}`;

  function begin(python) {
    for (const exercise of document.querySelectorAll(".live-exercise")) set(exercise, python);
  }

  function set(exercise, python) {
    const { task } = exercise.dataset, [check, stop, anew] = exercise.querySelectorAll("button");
    const text = exercise.querySelector("textarea"), report = exercise.querySelector("pre");
    const first = text.value;
    text.value = localStorage.getItem(kept(task)) ?? first;
    for (const control of [text, check, anew]) control.disabled = false;

    async function run() {
      for (const button of document.querySelectorAll(".live-exercise [name=check]")) button.disabled = true;
      stop.disabled = false;
      report.hidden = false;
      report.textContent = "Checking …";
      const answer = await python.ask("checked", task, text.value);
      report.textContent = answer.stopped ? "Stopped. The next check starts Python anew."
        : answer.error ?? `${answer.printed ? `${answer.printed.trimEnd()}\n\n` : ""}${answer.report}`;
      report.classList.toggle("live-right", answer.points !== undefined && answer.points === answer.of);
      report.classList.toggle("live-wrong", Boolean(answer.error));
      for (const button of document.querySelectorAll(".live-exercise [name=check]")) button.disabled = false;
      stop.disabled = true;
    }

    check.addEventListener("click", run);
    stop.addEventListener("click", () => python.stop());
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

  live.part(place, "exercises", "names", begin);
})();
