/** What the page is made of, what it has sent, and what else it could compute with. */

import type { Files } from "../files";
import type { Loaded, RuntimeName } from "../loading";
import { classNames, type Manifest } from "../manifest";
import type { Timed } from "../messages";
import { byId, fillList, make } from "./dom";
import { bytes, time } from "./text";

const STEPS: Partial<Record<Timed["step"], string>> = {
  check: "Checking every byte of the model",
  start: "Starting the networks",
  regenerate: "Making random numbers again from their seed",
  warm: "A first try of everything",
};

export function showSent(requests: number): void {
  byId("sent").dataset.requests = String(requests);
  byId("sent-text").textContent = requests
    ? `${requests} requests since loading: something is wrong, do not trust this page`
    : "0 bytes have left this device since the page was loaded";
}

export function showAbout(manifest: Manifest, files: Files, loaded: Loaded, times: Timed[]): void {
  const { inputs, expansion } = manifest;
  const [channels, height, width] = inputs.shape;
  const size = [...files.values()].reduce((sum, content) => sum + content.length, 0);
  const steps = times.map(({ step, ms }): [string, string] => [STEPS[step] ?? step, time(ms)]);
  fillList(byId("about"), [
    ["Images", `${width} × ${height}, ${channels === 1 ? "gray" : "coloured"}`],
    ["Answers", classNames(inputs).join(", ")],
    ["Model", `${manifest.model}, ${expansion.d.toLocaleString("en")} weights, of which ${expansion.k.toLocaleString("en")} directions are personal`],
    ["Taught by", `${manifest.method}, ${manifest.round} rounds`],
    ["Loaded", `${bytes(size)} of model, ${bytes(loaded.bytes.program)} of program, in ${time(loaded.ms)}`],
    ...steps,
  ]);
}

/** Another way to compute is a new page, since this one can load nothing more. */
export function showRuntimeChoice(name: RuntimeName, askedForGpu: boolean): void {
  const line = byId("runtime");
  const link = (address: string, text: string): HTMLElement => make("a", { href: address }, text);
  if (name === "webgpu")
    line.replaceChildren("Computed by the graphics card (WebGPU). ", link("./", "Use WebAssembly instead"), ".");
  else if (askedForGpu) line.replaceChildren("This browser has no WebGPU, so WebAssembly computes, in one thread.");
  else {
    line.replaceChildren("Computed by WebAssembly, in one thread. ");
    if ("gpu" in navigator)
      line.append(link("?runtime=webgpu", "Use the graphics card"), " (loads 27 MB more; for large models).");
  }
}
