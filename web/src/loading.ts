/** From an address to a running engine, after which no request can be made. */

import wasmProgram from "onnxruntime-web/ort-wasm-simd-threaded.wasm?url";
import webgpuProgram from "onnxruntime-web/ort-wasm-simd-threaded.asyncify.wasm?url";
import { Engine } from "./engine";
import { fetchBundle, type FetchFile, type Files } from "./files";
import { forbidAll, forbidRequests } from "./policy";
import wasmWorker from "./worker-wasm?worker&url";
import webgpuWorker from "./worker-webgpu?worker&url";

export type RuntimeName = "wasm" | "webgpu";

const RUNTIMES = {
  wasm: { worker: wasmWorker, program: wasmProgram },
  webgpu: { worker: webgpuWorker, program: webgpuProgram },
};

export interface Loaded {
  engine: Engine;
  files: Files | null; // null if there is no bundle beside the page
  bytes: { program: number; bundle: number };
  ms: number;
}

/** Whether the browser finds a graphics card to compute on; one without says so on its console. */
export async function hasGpu(): Promise<boolean> {
  const { gpu } = navigator as { gpu?: { requestAdapter(): Promise<unknown> } };
  return Boolean(await gpu?.requestAdapter());
}

/** Load the program and the bundle beside the page; then forbid all requests. */
export async function load(name: RuntimeName): Promise<Loaded> {
  const start = performance.now();
  const { worker, program } = RUNTIMES[name];
  const [script, wasm, files] = await Promise.all([get(worker), get(program), fetchBundle(beside).catch(missing)]);
  const ms = performance.now() - start;
  const sizes = [...(files?.values() ?? [])].map((content) => content.length);
  const bytes = { program: script.length + wasm.length, bundle: sizes.reduce((a, b) => a + b, 0) };
  forbidRequests(); // the worker has the same policy from its start
  const engine = await Engine.start(script, wasm);
  forbidAll();
  return { engine, files, bytes, ms };
}

/** A bundle's files as the person opened them. */
export async function openFiles(files: Iterable<File>): Promise<Files> {
  const named = [...files].map(async (file) => [file.name, new Uint8Array(await file.arrayBuffer())] as const);
  return new Map(await Promise.all(named));
}

class MissingError extends Error {}

const beside: FetchFile = (name) => get(`bundle/${name}`);

async function get(address: string): Promise<Uint8Array<ArrayBuffer>> {
  const response = await fetch(address, { cache: "no-cache" });
  if (response.status === 404) throw new MissingError(`${address} is not there`);
  if (!response.ok) throw new Error(`${address} could not be loaded (${response.status})`);
  return new Uint8Array(await response.arrayBuffer());
}

function missing(error: unknown): null {
  if (error instanceof MissingError) return null;
  throw error;
}
