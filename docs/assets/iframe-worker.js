// Browsers start no worker from file://, so there the search runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.terminate = () => frame.remove();
      this.started = new Promise((resolve) =>
        frame.addEventListener("load", () => resolve(this.start(frame.contentWindow, String(url))), {
          once: true,
        }),
      );
      document.body.append(frame);
    }

    async start(inside, url) {
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = inside.document.createElement("script");
          script.onload = resolve;
          script.onerror = () => reject(new Error(`cannot load ${source}`));
          script.src = source;
          inside.document.body.append(script);
        });
      inside.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      await load(url);
      return inside;
    }

    async postMessage(data) {
      const inside = await this.started;
      inside.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) }));
    }
  };
}
