/** Whatever a person gives the page: it works, or is refused in a sentence. */

import { existsSync, unlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { crc32, deflateSync } from "node:zlib";
import type { Browser } from "playwright-core";
import { afterAll, beforeAll, expect, inject, test } from "vitest";
import { image, known, launch, Visit } from "./visit";

let browser: Browser;
beforeAll(async () => void (browser = await launch()));
afterAll(() => browser.close());

test("1 image and 5,000 images both work, as in Python", async () => {
  const visit = await Visit.start(browser);
  await visit.choose(image("digits", 0));
  await visit.status("A model of your own from 1 image,");
  await visit.expectAnswersOf(known().one);
  await visit.page.getByRole("button", { name: "Remove all" }).click();
  await visit.status("All images are removed");
  await visit.choose(Array.from({ length: 5000 }, (_, i) => image("digits", i)));
  await visit.status("A model of your own from 5,000 images");
  await visit.expectAnswersOf(known().many);
  expect(await visit.page.locator(".answers li").count()).toBe(24);
  await visit.page.getByRole("button", { name: /Show 24 more/ }).click();
  expect(await visit.page.locator(".answers li").count()).toBe(48);
  visit.expectSilence();
  await visit.close();
});

test("a bundle with one flipped byte is refused by name, and the one before stays", async () => {
  const visit = await Visit.start(browser);
  const names = ["hypernetwork.onnx", "classifier.onnx", "weights.bin", "manifest.json", "samples.bin", "samples.json"];
  for (const file of names) {
    await visit.openBundle(inject("bundle"), (name, content) => {
      if (name === file) content[content.length >> 1] ^= 1;
      return content;
    });
    await visit.page.getByRole("alert").filter({ hasText: `${file} is not what SHA256SUMS says` }).waitFor();
  }
  await visit.sample(0);
  await visit.status("A model of their own");
  expect(await visit.page.locator("#problem").isVisible()).toBe(false);
  await visit.expectAnswersOf(known().samples[0]);
  visit.expectSilence();
  await visit.close();
});

test("a whole bundle that the page cannot use is refused, and the one before still answers", async () => {
  const visit = await Visit.start(browser);
  await visit.openBundle(join(inject("known"), "floats"));
  await visit.page.getByRole("alert").filter({ hasText: "it reads inputs of shape 1 × 8 × 8 and type float32" }).waitFor();
  await visit.sample(0);
  await visit.status("A model of their own");
  await visit.expectAnswersOf(known().samples[0]);
  await visit.openBundle(inject("bundle"), (name, content) => {
    if (name === "samples.json") return Buffer.from("{");
    return name === "weights.bin" ? content.fill(0) : content; // another model
  }, "with its sums");
  await visit.page.getByRole("alert").filter({ hasText: "samples.json is damaged" }).waitFor();
  await visit.sample(1);
  await visit.status("A model of their own");
  await visit.expectAnswersOf(known().samples[1]);
  visit.expectSilence();
  await visit.close();
});

test("a bundle without one of its files is refused by name", async () => {
  const visit = await Visit.start(browser);
  const folder = inject("bundle");
  await visit.page.locator("#bundle-files").setInputFiles([join(folder, "SHA256SUMS"), join(folder, "manifest.json")]);
  await visit.page.getByRole("alert").filter({ hasText: "the bundle has no hypernetwork.onnx" }).waitFor();
  await visit.page.locator("#bundle-files").setInputFiles([join(folder, "manifest.json")]);
  await visit.page.getByRole("alert").filter({ hasText: "the bundle has no SHA256SUMS" }).waitFor();
  visit.expectSilence();
  await visit.close();
});

test("a file that is no image is named, and the others count", async () => {
  const visit = await Visit.start(browser);
  const [text, broken] = ["letter.txt", "half.png"].map((name) => join(inject("shots"), name));
  writeFileSync(text, "not an image");
  writeFileSync(broken, Buffer.from("89504e470d0a1a0a0000000d4948", "hex"));
  await visit.choose([text, image("digits", 0), broken]);
  await visit.status("A model of your own from 1 image,");
  expect(await visit.notes()).toContain("letter.txt, half.png could not be read as an image");
  await visit.expectAnswersOf(known().one);
  await visit.choose([text]);
  await visit.status("1 image, as before");
  visit.expectSilence();
  await visit.close();
});

test("an image too wide for a canvas is named, and the others count", async () => {
  const visit = await Visit.start(browser);
  const wide = join(inject("shots"), "wide.png");
  writeFileSync(wide, blackPng(70_000, 1));
  await visit.choose([wide, image("digits", 0)]);
  await visit.status("A model of your own from 1 image,");
  expect(await visit.notes()).toContain("wide.png could not be read as an image");
  visit.expectSilence();
  await visit.close();
});

function blackPng(width: number, height: number): Buffer {
  const chunk = (type: string, content: Buffer): Buffer => {
    const [size, sum, body] = [Buffer.alloc(4), Buffer.alloc(4), Buffer.concat([Buffer.from(type), content])];
    size.writeUInt32BE(content.length);
    sum.writeUInt32BE(crc32(body));
    return Buffer.concat([size, body, sum]);
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width, 0);
  head.writeUInt32BE(height, 4);
  head[8] = 8; // bits of gray
  const rows = deflateSync(Buffer.alloc((width + 1) * height));
  const magic = Buffer.from("89504e470d0a1a0a", "hex");
  return Buffer.concat([magic, chunk("IHDR", head), chunk("IDAT", rows), chunk("IEND", Buffer.alloc(0))]);
}

test("a file that is gone when it is read is reported in a sentence", async () => {
  const visit = await Visit.start(browser);
  const gone = join(inject("shots"), "SHA256SUMS");
  writeFileSync(gone, "soon gone");
  await visit.page.evaluate(() => document.body.append(Object.assign(document.createElement("input"), { type: "file", id: "aside" })));
  await visit.page.locator("#aside").setInputFiles(gone);
  unlinkSync(gone);
  await visit.page.evaluate(() => {
    const transfer = new DataTransfer();
    transfer.items.add(document.querySelector<HTMLInputElement>("#aside")!.files![0]);
    document.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer }));
  });
  await visit.page.getByRole("alert").filter({ hasText: "These files could not be taken" }).waitFor();
  visit.expectSilence();
  await visit.close();
});

test("images of another size are scaled, and the page says so", async () => {
  const visit = await Visit.start(browser);
  await visit.choose([image("stripes", 0), image("digits", 0)]); // coloured, 32 x 32
  await visit.status("A model of your own from 2 images");
  expect(await visit.notes()).toContain("stripes-0000.png had another size: the middle was scaled to 8 × 8.");
  visit.expectSilence();
  await visit.close();
});

test("another bundle can be opened, from files or as a folder", async () => {
  const visit = await Visit.start(browser);
  await visit.page.locator("#bundle-folder").setInputFiles(join(inject("known"), "cnn"));
  await visit.status("Ready. Take some images.");
  expect(await visit.page.locator("#about").innerText()).toContain("32 × 32, coloured");
  await visit.choose(Array.from({ length: 100 }, (_, i) => image("stripes", i)));
  await visit.status("A model of your own from 100 images");
  await visit.expectAnswersOf(known().cnn);
  await visit.openBundle(inject("bundle"));
  await visit.status("Ready. Choose a person");
  visit.expectSilence();
  await visit.close();
});

test("the page without a bundle says so and takes one", async () => {
  const context = await browser.newContext();
  const page = await context.newPage();
  await page.route("**/bundle/**", (route) => route.fulfill({ status: 404 }));
  await page.goto(inject("url"));
  await page.getByRole("alert").filter({ hasText: "There is no model beside this page" }).waitFor();
  expect(existsSync(join(inject("bundle"), "SHA256SUMS"))).toBe(true);
  await page.locator("#bundle-folder").setInputFiles(inject("bundle"));
  await page.locator("#status", { hasText: "Ready" }).waitFor();
  await context.close();
});
