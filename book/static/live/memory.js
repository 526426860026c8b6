/* Memory of ZeRO's stages and FSDP: sliders, a bar for each strategy, and the formula with its numbers. */
(() => {
  const place = document.getElementById("memory"), form = place.querySelector("form");
  const one = (selector) => place.querySelector(selector);
  const KINDS = { parameters: "parameters", gradients: "gradients", optimizer: "optimizer states", buffers: "buffers" };
  const strategy = one("[name=strategy]"), said = one(".live-said");
  let python = null, choices = null, now = null, asked = 0;

  function begin(own, offered) {
    [python, choices] = [own, offered];
    form.model.max = choices.models.length - 1;
    form.model.value = choices.models.findIndex(([name]) => name === "meta-llama/Llama-2-7b-hf");
    for (const name of Object.keys(choices.gpus)) form.gpu.add(new Option(name));
    form.gpu.value = "A100-80";
    for (const name of choices.optimizers) form.optimizer.add(new Option(name));
    for (const moved of ["input", "change"]) form.addEventListener(moved, count);
    form.addEventListener("submit", (event) => event.preventDefault());
    strategy.addEventListener("change", draw);
    addEventListener("resize", draw);
    count();
  }

  async function count() {
    const mine = ++asked, [model, parameters] = choices.models[form.model.value], gpus = 2 ** form.gpus.value;
    form.model_said.value = `${model.split("/").pop()}, ${(parameters / 1e9).toPrecision(3)} B parameters`;
    form.gpus_said.value = gpus;
    form.model.setAttribute("aria-valuetext", form.model_said.value);
    form.gpus.setAttribute("aria-valuetext", gpus);
    const { precision, optimizer, offload } = live.values(form);
    const answer = await python.ask("counted", JSON.stringify({ model, gpus, precision, optimizer, offload }));
    if (mine !== asked) return; // the slider has moved on
    now = answer;
    draw();
  }

  function draw() {
    if (now.error) { said.textContent = now.error; return; }
    const capacity = choices.gpus[form.gpu.value], able = now.rows.filter((row) => !row.error);
    one(".memory-legend").innerHTML = live.legend({ ...KINDS, end: `${(capacity / 2 ** 30).toFixed(0)} GiB, all that a GPU has` });
    live.bars(one(".memory-bars"), able.map((row) => ({ bytes: row.bytes, total: row.total,
      name: row.host ? `${row.strategy}, ${(row.host / 2 ** 30).toFixed(1)} GiB on the host` : row.strategy })), capacity);
    said.innerHTML = now.rows.filter((row) => row.error).map((row) =>
      live.escaped(`${row.strategy} is not drawn: ${row.error}.`)).join("<br>");
    const chosen = able.some((row) => row.strategy === strategy.value) ? strategy.value : able[able.length - 1]?.strategy;
    strategy.replaceChildren(...able.map((row) => new Option(row.strategy, row.strategy, false, row.strategy === chosen)));
    one(".memory-formula").textContent = able.find((row) => row.strategy === chosen)?.formula ?? "";
  }

  live.part(place, "memory", "choices", begin);
})();
