/* Runs the course's own Python, by Pyodide, beside the page. Asked {id, call, values}, it answers {id, answer}. */
import { loadPyodide } from "./pyodide/pyodide.mjs";

const PACKED = "pyodide.asm.wasm";
const direct = self.fetch.bind(self);

/* The program is stored packed, which is a third of its size; what has come of it is told to the page. */
self.fetch = async (what, ...rest) => {
  const url = String(what.url ?? what);
  if (!url.endsWith(PACKED)) return direct(what, ...rest);
  const packed = await direct(`${url}.gz`);
  if (!packed.ok) return packed;
  const all = Number(packed.headers.get("content-length"));
  let came = 0;
  const counted = packed.body.pipeThrough(new TransformStream({
    transform(part, out) { came += part.byteLength; postMessage({ progress: all ? came / all : 0 }); out.enqueue(part); },
  }));
  return new Response(counted.pipeThrough(new DecompressionStream("gzip")), { headers: { "content-type": "application/wasm" } });
};

const ready = (async () => {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  const modules = await direct(new URL("./modules.zip", import.meta.url));
  python.unpackArchive(await modules.arrayBuffer(), "zip");
  return python.pyimport("book.live.bench");
})();

self.onmessage = async ({ data: { id, call, values } }) => {
  try {
    const bench = await ready;
    postMessage({ id, answer: JSON.parse(bench[call](...values)) });
  } catch (error) {
    postMessage({ id, answer: { error: String(error) } });
  }
};
