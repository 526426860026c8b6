/* The planner: fields as `course plan` has options, and what it finds as sentences, bars and tables. */
(() => {
  const place = document.getElementById("planner"), form = place.querySelector("form");
  const one = (selector) => place.querySelector(selector);
  const KINDS = { parameters: "parameters", gradients: "gradients", optimizer: "optimizer states",
    activations: "activations", logits: "logits", buffers: "buffers", runtime: "CUDA and its libraries, assumed, not in the sums" };
  const INSTEAD = { gpus: (value) => `${value} GPUs`, gpu: (value) => value, sequence_length: (value) => `${whole(value)} tokens long` };
  const said = one(".live-said"), { escaped } = live;
  const whole = (number) => Math.round(number).toLocaleString("en");
  const gib = (bytes) => (bytes / 2 ** 30).toFixed(1);
  const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
  let python = null, now = null, asked = 0;

  function begin(own, choices) {
    python = own;
    for (const name of choices.models) form.model.add(new Option(name));
    for (const [name, node] of Object.entries(choices.gpus)) form.gpu.add(new Option(`${name} (${node} in a node)`, name));
    for (const name of choices.optimizers) form.optimizer.add(new Option(name));
    form.model.value = "facebook/opt-6.7b";
    form.gpu.value = "A100-80";
    form.addEventListener("change", plan);
    form.addEventListener("submit", (event) => { event.preventDefault(); plan(); });
    one("[name=copy]").addEventListener("click", copy);
    one(".planner-if").addEventListener("click", take);
    addEventListener("resize", draw);
    plan();
  }

  async function plan() {
    if (!form.reportValidity()) return;
    const mine = ++asked, wanted = JSON.stringify(live.values(form));
    said.textContent = "Searching …";
    const answer = await python.ask("planned", wanted);
    if (mine !== asked) return; // another question has been asked since
    one(".live-result").hidden = Boolean(answer.error);
    said.classList.toggle("live-wrong", Boolean(answer.error));
    said.textContent = answer.error ?? answer.answer;
    now = answer.error ? null : answer;
    if (!now) return;
    one(".planner-bill").textContent = now.bill;
    one(".planner-start").textContent = now.said.join(" ");
    one(".live-command").hidden = !now.command;
    one(".live-command pre").textContent = now.command;
    one(".planner-why").innerHTML = [...now.explanation, now.margins].map((line) => `<li>${escaped(line)}</li>`).join("");
    one(".planner-asked").textContent = now.asked;
    table();
    draw();
    alternatives(wanted, mine);
  }

  function draw() {
    if (!now) return;
    one(".planner-legend").innerHTML = live.legend({ ...KINDS, end: `${gib(now.gpu_memory_bytes)} GiB, all that a GPU has` });
    live.bars(one(".planner-bars"), now.bars.map(({ strategy, bytes, chance, total }) => ({ bytes, total,
      name: `${strategy}: ${chance === undefined ? "does not fit" : `${percent(chance)} to fit`}` })), now.gpu_memory_bytes);
  }

  function table() {
    const heads = ["strategy", "sequences × micro-batches", "GiB", "chance to fit", `tokens/s, and of ${percent(now.plans[0].interval_share)} of such plans`,
      "MFU", ...("hours" in now.plans[0] ? ["hours", "dollars"] : [])];
    const rows = now.plans.map((row) => [escaped(row.strategy), `${row.plan.micro_batch} × ${row.plan.accumulation}`,
      gib(Object.values(row.memory_bytes).reduce((sum, size) => sum + size, 0)), percent(row.chance_that_it_fits),
      `${whole(row.tokens_per_second)}<br><small>${row.tokens_per_second_interval.map(whole).join(" to ")}</small>`, percent(row.mfu, 1),
      ...("hours" in row ? [whole(row.hours), row.dollars ? whole(row.dollars) : "–"] : [])]);
    one(".planner-plans").innerHTML = `<thead><tr>${heads.map((head) => `<th scope="col">${head}</th>`).join("")}</tr></thead>` +
      `<tbody>${rows.map((row) => `<tr>${row.map((cell) => `<td>${cell}</td>`).join("")}</tr>`).join("")}</tbody>`;
  }

  /* One after the other, so that a new question need not wait for all of them. */
  async function alternatives(wanted, mine) {
    const shown = one(".planner-if");
    shown.innerHTML = `<thead><tr><th scope="col">instead</th><th scope="col">the best plan</th><th scope="col">tokens/s</th>` +
      `<th scope="col">beside this plan</th><th scope="col"></th></tr></thead><tbody></tbody>`;
    for (const what of now.what_if) {
      const rows = await python.ask("varied", wanted, what);
      if (mine !== asked) return;
      const [name, value] = what.split("="), label = INSTEAD[name](value);
      const row = rows.error ? { why: rows.error } : rows[0];
      const cells = row.fits
        ? `<td>${escaped(row.strategy)}</td><td>${whole(row.tokens_per_second)}</td>` +
          `<td>${(row.tokens_per_second / now.plans[0].tokens_per_second).toFixed(2)} ×</td>`
        : `<td colspan="3">does not fit: ${escaped(row.why.split(": ").pop())}</td>`;
      shown.tBodies[0].insertAdjacentHTML("beforeend", `<tr><td>${escaped(label)}</td>${cells}<td><button type="button"
        data-name="${name}" data-value="${escaped(value)}" aria-label="take it: ${escaped(label)}">take it</button></td></tr>`);
    }
  }

  function take(event) {
    const { name, value } = event.target.dataset;
    if (!name) return;
    form[name].value = value;
    said.scrollIntoView({ block: "center" });
    plan();
  }

  async function copy(event) {
    const text = one(".live-command pre");
    try {
      await navigator.clipboard.writeText(text.textContent);
      event.target.textContent = "Copied";
    } catch { // no right to: marked, it can be copied by hand
      getSelection().selectAllChildren(text);
      event.target.textContent = "Marked";
    }
    setTimeout(() => { event.target.textContent = "Copy"; }, 2000);
  }

  live.part(place, "planner", "choices", begin);
})();
