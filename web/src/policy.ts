/** Once everything is loaded, the browser is told to refuse every further request. */

/** No request of any kind, of the page or of workers that are started from now on.  What is left is
 * needed to start one: from a blob, which has this policy as well, with a WebAssembly program. */
export const forbidRequests = (): void =>
  addPolicy("default-src 'none'; script-src 'wasm-unsafe-eval'; worker-src blob:");

/** No worker, form or frame either, for the page has all that it needs. */
export const forbidAll = (): void =>
  addPolicy("default-src 'none'; form-action 'none'; base-uri 'none'; frame-src 'none'");

/** Policies add up: one can only forbid more. */
function addPolicy(content: string): void {
  const meta = document.createElement("meta");
  meta.httpEquiv = "Content-Security-Policy";
  meta.content = content;
  document.head.append(meta);
}

/** Call back with the number of requests since now, at each one. */
export function countRequests(onRequest: (count: number) => void): void {
  const since = performance.now();
  let count = 0;
  new PerformanceObserver((list) => {
    count += list.getEntries().filter((entry) => entry.startTime >= since).length;
    onRequest(count);
  }).observe({ type: "resource" });
}
