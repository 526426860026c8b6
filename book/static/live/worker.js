/* Runs the course's own Python, by Pyodide, beside the page. It is sent {sizes, module} once: the bytes of each file to
   fetch, and the module to call. Asked {id, call, values}, it answers {id, answer}. */
import { loadPyodide } from "./pyodide/pyodide.mjs";

const FOLDER = new URL("./pyodide/", import.meta.url).href;
const direct = self.fetch.bind(self);
let ready;

/* All files are fetched at once; how many of their bytes have come is told to the page. What is packed (.gz) is stored so
   because it is a third of its size. */
async function fetched(sizes) {
  let came = 0;
  const one = async (name) => {
    const answer = await direct(new URL(`./${name}`, import.meta.url));
    if (!answer.ok) throw new Error(`${name}: the server says ${answer.status}`);
    const counted = answer.body.pipeThrough(new TransformStream({
      transform(part, out) { came += part.byteLength; postMessage({ came }); out.enqueue(part); },
    }));
    const data = name.endsWith(".gz") ? counted.pipeThrough(new DecompressionStream("gzip")) : counted;
    return [name.replace(/\.gz$/, "").replace("pyodide/", ""), await new Response(data).arrayBuffer()];
  };
  return Object.fromEntries(await Promise.all(Object.keys(sizes).map(one)));
}

async function start({ sizes, module }) {
  const files = await fetched(sizes);
  const types = { wasm: "application/wasm", mjs: "text/javascript", json: "application/json" };
  const held = (name) => new Blob([files[name]], { type: types[name.split(".").pop()] ?? "application/zip" });
  self.fetch = async (what, ...rest) => {
    const name = String(what.url ?? what).replace(FOLDER, "");
    return name in files ? new Response(held(name)) : direct(what, ...rest);
  };
  const program = URL.createObjectURL(held("pyodide.asm.mjs"));
  const { default: createPyodideModule } = await import(program);
  const python = await loadPyodide({ indexURL: FOLDER, createPyodideModule });
  URL.revokeObjectURL(program);
  python.unpackArchive(files["modules.zip"], "zip");
  return python.pyimport(`book.live.${module}`);
}

self.onmessage = async ({ data }) => {
  if (data.sizes) { ready = start(data); ready.catch(() => {}); return; }
  try {
    const module = await ready;
    postMessage({ id: data.id, answer: JSON.parse(module[data.call](...data.values)) });
  } catch (error) {
    postMessage({ id: data.id, answer: { error: String(error).trim().split("\n").pop(), broken: true } });
  }
};
