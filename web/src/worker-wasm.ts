/** A worker that computes by WebAssembly, in one thread. */

import * as ort from "onnxruntime-web/wasm";
import { serve } from "./serving";

serve(ort, "wasm");
