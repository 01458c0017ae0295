/** A worker that computes by WebGPU. */

import * as ort from "onnxruntime-web/webgpu";
import { serve } from "./serving";

serve(ort, "webgpu");
