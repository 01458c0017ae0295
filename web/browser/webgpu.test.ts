/** The second way to compute, where a browser has WebGPU: here on a graphics card of software. */

import { expect, test } from "vitest";
import { known, launch, Visit } from "./visit";

test("by WebGPU, a sample client gets Python's answers, and no request is made", async () => {
  const browser = await launch("software");
  const visit = await Visit.start(browser, {}, "?runtime=webgpu");
  expect(await visit.page.locator("#runtime").innerText()).toContain("Computed by the graphics card");
  await visit.sample(0);
  await visit.status("A model of their own");
  await visit.expectAnswersOf(known().samples[0]);
  visit.expectSilence();
  await browser.close();
});

test("where there is none, WebAssembly computes, and the page says so", async () => {
  const browser = await launch();
  const visit = await Visit.start(browser, {}, "?runtime=webgpu");
  expect(await visit.page.locator("#runtime").innerText()).toContain("no WebGPU, so WebAssembly computes");
  await visit.sample(0);
  await visit.status("A model of their own");
  await visit.expectAnswersOf(known().samples[0]);
  await browser.close();
});
