/* The loader of the live parts, one for all: a button with the size, how much has come, then the part.

   A classic script, so that it runs from file:// too, where no worker and so no Python can be started, and says so. */
window.live = (() => {
  const folder = document.currentScript.src.replace(/[^/]*$/, "");
  let sizes = {};

  /* A part's Python. `ask` answers with what the function returned, or with {error}. `stop` ends it, whatever it does;
     the next question starts it anew. */
  function python(module, told) {
    let worker = null, asked = 0, waiting = new Map();
    function end(answer) {
      worker?.terminate();
      worker = null;
      const left = waiting;
      waiting = new Map();
      for (const resolve of left.values()) resolve(answer);
    }
    function start() {
      worker = new Worker(`${folder}worker.js`, { type: "module" });
      worker.onerror = () => end({ error: "Python cannot start here: it needs a browser with module workers." });
      worker.onmessage = ({ data: { came, id, answer } }) => {
        if (came) { told(came); return; }
        waiting.get(id)?.(answer);
        waiting.delete(id);
        if (answer.broken) end(answer);
      };
      worker.postMessage({ sizes, module });
    }
    return {
      ask(call, ...values) {
        if (!worker) start();
        return new Promise((resolve) => {
          waiting.set(++asked, resolve);
          worker.postMessage({ id: asked, call, values });
        });
      },
      stop() { end({ stopped: true }); },
    };
  }

  /* Keep what has been loaded, and this page with all that it shows, for a time without a network. */
  async function kept() {
    if (!("serviceWorker" in navigator)) return;
    try {
      await navigator.serviceWorker.register(`${folder}../../live-cache.js`);
      const controlled = new Promise((resolve) => navigator.serviceWorker.addEventListener("controllerchange", resolve));
      const patience = new Promise((resolve) => setTimeout(resolve, 3000));
      if (!navigator.serviceWorker.controller) await Promise.race([controlled, patience]);
      const shown = performance.getEntriesByType("resource").map((one) => one.name.split("#")[0]);
      for (const url of new Set([location.href.split("#")[0], ...shown]))
        if (url.startsWith(location.origin)) fetch(url).catch(() => {});
    } catch { /* a browser that keeps nothing (a private window) loads it again next time */ }
  }

  /* A part: `place` is its element, with a `.live-body` that is shown when Python answers `first`; `begin` is then called
     with Python and that answer. */
  function part(place, module, first, begin) {
    const size = Object.values(sizes).reduce((sum, one) => sum + one, 0);
    place.insertAdjacentHTML("afterbegin", `<p class="live-load"><button type="button" name="open">Load
      (${(size / 1e6).toFixed(1)} MB)</button> <progress max="${size}" value="0" hidden aria-label="loaded"></progress>
      <span role="status"></span></p>`);
    const load = place.querySelector(".live-load");
    const [button, progress, said] = load.children;
    if (location.protocol === "file:") {
      button.disabled = true;
      const page = location.pathname.split("/").slice(-2).join("/");
      said.innerHTML = `A browser starts no Python from a file. In the book's folder run
        <code>python -m http.server</code>, then open <code>http://localhost:8000/${page}</code>.`;
      return;
    }
    button.addEventListener("click", async () => {
      button.disabled = true;
      progress.hidden = false;
      said.textContent = "";
      await kept();
      const own = python(module, (came) => {
        progress.value = came;
        if (came >= size) said.textContent = "starting Python …";
      });
      const answer = await own.ask(first);
      progress.hidden = true;
      if (answer.error) {
        own.stop();
        said.textContent = `It could not be loaded (${answer.error}): try again.`;
        button.disabled = false;
        return;
      }
      load.hidden = true;
      place.querySelector(".live-body").hidden = false;
      begin(own, answer);
    });
  }

  const escaped = (text) => String(text).replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);
  const legend = (kinds) => `<ul class="live-legend">${Object.entries(kinds).map(([name, said]) =>
    `<li><span class="live-swatch live-${name}"></span>${escaped(said)}</li>`).join("")}</ul>`;

  /* Stacked bars of memory, one below the other, with a line where the GPU's memory ends. Rows: {name, total, bytes by kind}.
     Drawn at the size of the page, so that its letters stay as large as the page's on a telephone. */
  function bars(place, rows, capacity) {
    const GIB = 2 ** 30, ROW = 46, BAR = 18, width = Math.max(place.clientWidth, 240);
    const length = (row) => Object.values(row.bytes).reduce((sum, one) => sum + one, 0);
    const most = Math.max(...rows.map(length), capacity) * 1.02;
    const at = (bytes) => bytes / most * width;
    const parts = rows.map((row, i) => {
      let before = 0;
      const pieces = Object.entries(row.bytes).filter(([, size]) => size > 0).map(([kind, size]) => {
        const piece = `<rect class="live-${kind}" x="${at(before)}" y="${i * ROW + 20}" width="${at(size)}" height="${BAR}">` +
          `<title>${kind} ${(size / GIB).toFixed(1)} GiB</title></rect>`;
        before += size;
        return piece;
      });
      const room = Math.floor((width - 80) / 7), name = row.name.length > room ? `${row.name.slice(0, room - 1)}…` : row.name;
      return `<text y="${i * ROW + 14}">${escaped(name)}</text>` +
        `<text class="live-total" x="${width}" y="${i * ROW + 14}">${(row.total / GIB).toFixed(1)} GiB</text>` +
        `<rect class="live-lane" y="${i * ROW + 20}" width="${width}" height="${BAR}"/>${pieces.join("")}` +
        `<line x1="${at(capacity)}" x2="${at(capacity)}" y1="${i * ROW + 18}" y2="${i * ROW + 22 + BAR}"/>`;
    });
    const said = rows.map((row) => `${row.name}: ${Object.entries(row.bytes).filter(([, size]) => size > 0)
      .map(([kind, size]) => `${kind} ${(size / GIB).toFixed(1)}`).join(", ")} GiB`).join("; ");
    place.innerHTML = `<svg class="live-bars" role="img" width="${width}" height="${rows.length * ROW}" aria-label="${escaped(said)}">` +
      `${parts.join("")}</svg>`;
  }

  /* A form's fields by name, as text. */
  const values = (form) => Object.fromEntries([...new FormData(form)].map(([name, text]) => [name, text.trim()]));

  return { part, bars, legend, values, escaped, comes(listed) { sizes = listed; } };
})();
