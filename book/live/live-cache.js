/* Keeps the live parts and their pages, so that they open without a network. The name changes with Python's files. */
const CACHE = "live-VERSION";
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(caches.keys().then((names) =>
  Promise.all(names.filter((name) => name.startsWith("live-") && name !== CACHE).map((name) => caches.delete(name))))
  .then(() => self.clients.claim())));
self.addEventListener("fetch", (event) => {
  const path = new URL(event.request.url).pathname;
  const isPython = path.includes("/_static/live/pyodide/"); // the cache is named by its bytes: what is kept is right
  if (event.request.method !== "GET" || !(path.includes("/_static/") || path.includes("/live/"))) return;
  event.respondWith(caches.open(CACHE).then(async (cache) => {
    const kept = await cache.match(event.request);
    if (kept && isPython) return kept;
    try {
      const fresh = await fetch(event.request);
      if (fresh.ok) cache.put(event.request, fresh.clone());
      return fresh;
    } catch (error) {
      if (kept) return kept;
      throw error;
    }
  }));
});
