/* Keeps what the live parts have loaded, so that they open without a network. The name changes with the book. */
const CACHE = "live-VERSION";
self.addEventListener("activate", (event) => event.waitUntil(caches.keys().then((names) =>
  Promise.all(names.filter((name) => name.startsWith("live-") && name !== CACHE).map((name) => caches.delete(name))))));
self.addEventListener("fetch", (event) => {
  if (!new URL(event.request.url).pathname.includes("/_static/live/")) return;
  event.respondWith(caches.open(CACHE).then(async (cache) => {
    const kept = await cache.match(event.request);
    if (kept) return kept;
    const fresh = await fetch(event.request);
    if (fresh.ok) cache.put(event.request, fresh.clone());
    return fresh;
  }));
});
