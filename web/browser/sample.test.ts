/** Sample clients: personalised as Python does it, and nothing leaves the page. */

import type { Browser } from "playwright-core";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { afterAll, beforeAll, expect, inject, test } from "vitest";
import { image, known, launch, Visit } from "./visit";

let browser: Browser;
beforeAll(async () => void (browser = await launch()));
afterAll(() => browser.close());

interface Listed {
  clients: { labels: number[] }[];
}

test("every sample client gets Python's answers, its accuracy is shown, and no request is made", async () => {
  const visit = await Visit.start(browser);
  const { clients } = JSON.parse(readFileSync(join(inject("bundle"), "samples.json"), "utf8")) as Listed;
  const python = known().samples;
  expect(await visit.page.locator(".sample").count()).toBe(clients.length);
  for (const [number, { labels }] of clients.entries()) {
    await visit.sample(number);
    await visit.status("A model of their own from 40 images");
    await visit.page.locator(`.sample[aria-pressed=true]:has-text("Person ${number + 1}")`).waitFor();
    await visit.expectAnswersOf(python[number]);
    const right = (names: string[]): number => names.filter((name, i) => name === String(labels[i])).length;
    const figures = await visit.page.locator(".figure").allInnerTexts();
    expect(figures[0]).toContain(`${right(python[number].own.names)} of 40 right`);
    expect(figures[1]).toContain(`${right(python[number].everyone.names)} of 40 right`);
  }
  await visit.sample(1);
  await visit.page.locator(".map .dot").waitFor();
  expect(await visit.page.locator("#times").innerText()).toMatch(/Looking at the images\s+[\d.]+ m?s/);
  await visit.shot("desktop-light");
  expect(await visit.page.locator("#sent").getAttribute("data-requests")).toBe("0");
  visit.expectSilence();
  await visit.close();
});

test.each(["flowdup serve", "any web server"])("once it is loaded from %s, page and worker can send nothing", async (from) => {
  const visit = await Visit.start(browser, {}, "", { headers: from === "flowdup serve" });
  const target = `${inject("url")}bundle/manifest.json`;
  const ask = (address: string) => fetch(address).then(() => "sent", () => "refused");
  expect(await visit.page.evaluate(ask, target)).toBe("refused");
  const worker = visit.page.workers()[0];
  expect(await worker.evaluate(ask, target)).toBe("refused");
  const program = visit.loaded.find((url) => url.includes("/worker-wasm"))!;
  const load = `import(${JSON.stringify(`${program}?secret`)}).then(() => "sent", () => "refused")`;
  expect(await worker.evaluate(load)).toBe("refused");
  const nest = (address: string) =>
    new Promise<string>((resolve) => {
      try {
        const nested = new Worker(address, { type: "module" });
        nested.onerror = () => resolve("refused");
        setTimeout(() => resolve("sent"), 2000); // it runs
      } catch {
        resolve("refused");
      }
    });
  expect(await worker.evaluate(nest, `${program}?nested`)).toBe("refused");
  const picture = (address: string) =>
    new Promise<string>((resolve) => {
      const element = new Image();
      element.onload = () => resolve("sent");
      element.onerror = () => resolve("refused");
      element.src = address;
    });
  expect(await visit.page.evaluate(picture, `${inject("url")}icon.svg?secret`)).toBe("refused");
  expect(visit.requests).toEqual(visit.refused); // Chromium tells of some, and why they were not sent
  await visit.close();
});

test("the server's policy is the page's, and files have their types", async () => {
  const page = await fetch(inject("url"));
  const policy = page.headers.get("content-security-policy");
  const [, own] = /Content-Security-Policy"\s+content="([^"]+)"/.exec(await page.text())!;
  expect(policy).toBe(`${own}; frame-ancestors 'none'`);
  expect(own).toContain("connect-src 'self'");
  const model = await fetch(`${inject("url")}bundle/classifier.onnx`);
  expect(model.headers.get("content-type")).toBe("application/octet-stream");
  expect((await fetch(`${inject("url")}bundle/../../pyproject.toml`)).status).toBe(404);
});

test("images unlike all others get a warning, and by choice the model for everyone", async () => {
  const visit = await Visit.start(browser);
  await visit.sample(0);
  await visit.status("A model of their own");
  await visit.page.getByLabel("Swap light and dark").check();
  await visit.page.locator("#warning").waitFor();
  await visit.expectAnswersOf(known().inverted);
  expect((await visit.answers()).every((row) => row.answer === row.own)).toBe(true);
  await visit.shot("foreign");
  const button = visit.page.getByRole("button", { name: "Use the model for everyone" });
  await button.click();
  expect(await visit.page.getByRole("radio", { name: "the model for everyone" }).isChecked()).toBe(true);
  expect((await visit.answers()).every((row) => row.answer === row.everyone)).toBe(true);
  const results = visit.page.locator("#results");
  await results.evaluate((element) => {
    const { dataset } = element;
    const count = (found: unknown[]): void => void (dataset.marks = String(Number(dataset.marks ?? 0) + found.length));
    new MutationObserver(count).observe(element, { attributeFilter: ["data-used"] });
  });
  for (let i = 0; i < 3; i++) await button.click();
  expect(await results.getAttribute("data-marks")).toBe("3"); // each click marks once
  await visit.page.getByLabel("Swap light and dark").uncheck();
  await visit.page.locator("#warning").waitFor({ state: "hidden" });
  visit.expectSilence();
  await visit.close();
});

test("the models stay right after another person was looked at", async () => {
  const visit = await Visit.start(browser);
  await visit.choose(image("digits", 0));
  await visit.status("A model of your own from 1 image,");
  await visit.sample(2);
  await visit.status("A model of their own");
  await visit.expectAnswersOf(known().samples[2]);
  await visit.close();
});
