/** The worker's side: a bundle is opened and makes models, while the page stays awake. */

import { Bundle, type Runtime } from "./bundle";
import { checkImages, pointSize } from "./manifest";
import type { Answers, Opened, Request, Timed } from "./messages";
import { readSamples } from "./samples";

interface OnnxRuntime {
  env: { wasm: { wasmBinary?: ArrayBufferLike | Uint8Array; numThreads?: number; proxy?: boolean } };
  InferenceSession: { create(content: Uint8Array, options: object): Promise<unknown> };
  Tensor: unknown;
}

/** Answer the page's requests, one after the other, with networks run by `provider`. */
export function serve(ort: OnnxRuntime, provider: "wasm" | "webgpu"): void {
  const create = (content: Uint8Array) =>
    ort.InferenceSession.create(content, { executionProviders: [provider] });
  const runtime = { InferenceSession: { create }, Tensor: ort.Tensor } as Runtime;
  let bundle: Bundle | null = null;

  async function answer(request: Request): Promise<Opened | Answers | null> {
    switch (request.kind) {
      case "start":
        ort.env.wasm.numThreads = 1; // more need special headers of the server
        ort.env.wasm.proxy = false;
        ort.env.wasm.wasmBinary = request.wasm;
        return null;
      case "open": {
        const { times, done } = stopwatch();
        const opened = await Bundle.load(request.files, runtime, done);
        const { manifest } = opened;
        checkImages(manifest.inputs);
        const samples = readSamples(request.files, manifest.inputs);
        await warmUp(opened);
        done("warm");
        bundle = opened; // last: one that is refused leaves the one before
        return { manifest, samples, times };
      }
      case "personalize": {
        if (!bundle) throw new Error("there is no bundle");
        const { times, done } = stopwatch();
        const { theta, verdict } = await bundle.personalize(request.points, done);
        const own = await bundle.logits(request.points, theta);
        done("own");
        const everyone = await bundle.logits(request.points, bundle.globalModel());
        done("everyone");
        return { own, everyone, verdict, times };
      }
    }
  }

  let last: Promise<void> = Promise.resolve();
  self.onmessage = ({ data }: MessageEvent<{ id: number; request: Request }>) => {
    last = last.then(async () => {
      try {
        self.postMessage({ id: data.id, value: await answer(data.request) });
      } catch (error) {
        self.postMessage({ id: data.id, error: error instanceof Error ? error.message : String(error) });
      }
    });
  };
}

/** A first model of nothing, so that the person's is made at full speed. */
async function warmUp(bundle: Bundle): Promise<void> {
  const { inputs } = bundle.manifest;
  const none = new (inputs.dtype === "uint8" ? Uint8Array : Float32Array)(pointSize(inputs));
  await bundle.logits(none, (await bundle.personalize(none)).theta);
}

/** Times between calls of `done`. */
function stopwatch(): { times: Timed[]; done: (step: Timed["step"]) => void } {
  const times: Timed[] = [];
  let before = performance.now();
  const done = (step: Timed["step"]): void => {
    const now = performance.now();
    times.push({ step, ms: now - before });
    before = now;
  };
  return { times, done };
}
