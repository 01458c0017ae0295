/** Once everything is loaded, the browser is told to refuse every further request. */

/** No request by script, of the page or of workers that are started from now on. */
export const forbidConnections = (): void => addPolicy("connect-src 'none'");

/** No request of any kind: no script, image, style or form either. */
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
