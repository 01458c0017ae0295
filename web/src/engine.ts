/** The page's side of its worker. */

import type { Files } from "./files";
import type { Answers, Opened, Reply, Request } from "./messages";

export class Engine {
  private readonly waiting = new Map<number, { resolve: (v: never) => void; reject: (e: Error) => void }>();
  private sent = 0;

  private constructor(private readonly worker: Worker) {
    worker.onmessage = ({ data }: MessageEvent<Reply<never>>) => {
      const waiter = this.waiting.get(data.id);
      this.waiting.delete(data.id);
      if ("error" in data) waiter?.reject(new Error(data.error));
      else waiter?.resolve(data.value);
    };
    worker.onerror = (event) => {
      event.preventDefault();
      for (const { reject } of this.waiting.values())
        reject(new Error(`the computation ended (${event.message || "no memory is left"}): reload the page`));
      this.waiting.clear();
    };
  }

  /** From the script's text.  It starts from a blob, so that it has the policy that the page has
   * now, and imports nothing: a worker from a file would have that of its server, perhaps none. */
  static async start(script: Uint8Array<ArrayBuffer>, wasm: Uint8Array): Promise<Engine> {
    const url = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
    const engine = new Engine(new Worker(url, { type: "module" }));
    await engine.ask<null>({ kind: "start", wasm }, [wasm.buffer]);
    URL.revokeObjectURL(url);
    return engine;
  }

  open(files: Files): Promise<Opened> {
    return this.ask<Opened>({ kind: "open", files });
  }

  personalize(points: Uint8Array): Promise<Answers> {
    return this.ask<Answers>({ kind: "personalize", points });
  }

  private ask<T>(request: Request, moved: Transferable[] = []): Promise<T> {
    const id = this.sent++;
    return new Promise<T>((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, request }, moved);
    });
  }
}
