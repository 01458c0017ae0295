/** Ways to give images, with hands, keys, on a phone, in the dark. */

import { readFileSync } from "node:fs";
import type { Browser, Locator } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { image, known, launch, Visit } from "./visit";

let browser: Browser;
beforeAll(async () => void (browser = await launch()));
afterAll(() => browser.close());

const bytesOf = (path: string): number[] => [...readFileSync(path)];

test("images can be dropped", async () => {
  const visit = await Visit.start(browser);
  const files = [0, 1, 2].map((number) => bytesOf(image("digits", number)));
  const transfer = await visit.page.evaluateHandle((contents) => {
    const made = new DataTransfer();
    contents.forEach((content, i) => made.items.add(new File([new Uint8Array(content)], `${i}.png`, { type: "image/png" })));
    return made;
  }, files);
  await visit.page.dispatchEvent("#drop", "dragover", { dataTransfer: transfer });
  expect(await visit.page.locator("#drop.over").count()).toBe(1);
  await visit.page.dispatchEvent("#drop", "drop", { dataTransfer: transfer });
  await visit.status("A model of your own from 3 images");
  visit.expectSilence();
  await visit.close();
});

test("an image can be pasted", async () => {
  const visit = await Visit.start(browser, { permissions: ["clipboard-read", "clipboard-write"] });
  await visit.page.evaluate(
    (content) =>
      navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([new Uint8Array(content)], { type: "image/png" }) })]),
    bytesOf(image("digits", 0)),
  );
  await visit.page.keyboard.press("Control+V");
  await visit.status("A model of your own from 1 image,");
  await visit.expectAnswersOf(known().one);
  visit.expectSilence();
  await visit.close();
});

test("a drawing can be added, an empty one cannot", async () => {
  const visit = await Visit.start(browser);
  const add = visit.page.getByRole("button", { name: "Add drawing" });
  await add.click();
  await visit.status("There are no images yet");
  expect(await visit.notes()).toContain("The pad is empty");
  for (let count = 1; count <= 2; count++) {
    await drawOne(visit, visit.page.locator("#pad"));
    if (count === 1) await visit.shot("drawing");
    await add.click();
    await visit.status(`A model of your own from ${count} image`);
  }
  const rows = await visit.answers();
  expect(rows).toHaveLength(2);
  expect(rows[0].own).toBe(rows[1].own);
  expect(await visit.page.locator(".figure").first().innerText()).toContain("answered otherwise by your own model");
  visit.expectSilence();
  await visit.close();
});

/** The digit 1, upright. */
async function drawOne(visit: Visit, pad: Locator): Promise<void> {
  await pad.scrollIntoViewIfNeeded();
  const box = (await pad.boundingBox())!;
  const { mouse } = visit.page;
  await mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.15);
  await mouse.down();
  await mouse.move(box.x + box.width * 0.5, box.y + box.height * 0.85, { steps: 10 });
  await mouse.up();
}

test("everything can be done by keys alone, and one sees where one is", async () => {
  const visit = await Visit.start(browser);
  const { keyboard } = visit.page;
  const focused = (): Promise<{ id: string; text: string; seen: boolean }> =>
    visit.page.evaluate(() => {
      const element = document.activeElement as HTMLElement;
      const shown = element.matches(".hidden-input") ? element.previousElementSibling! : element;
      const { outlineStyle, outlineWidth } = getComputedStyle(shown);
      const nowhere = element === document.body; // between the page's end and its beginning
      const seen = nowhere || (outlineStyle !== "none" && outlineWidth !== "0px");
      return { id: element.id, text: nowhere ? "" : (shown.textContent ?? ""), seen };
    });
  const tabTo = async (wanted: (found: { id: string; text: string }) => boolean): Promise<void> => {
    for (let i = 0; i < 60; i++) {
      await keyboard.press("Tab");
      const found = await focused();
      expect(found.seen, `focus is seen on '${found.id || found.text}'`).toBe(true);
      if (wanted(found)) return;
    }
    throw new Error("no such element is reached by Tab");
  };
  await tabTo(({ text }) => text.startsWith("Person 1"));
  await keyboard.press("Enter");
  await visit.status("A model of their own from 40 images");
  await visit.expectAnswersOf(known().samples[0]);
  await tabTo(({ id }) => id === "files");
  await tabTo(({ id }) => id === "pad");
  await keyboard.press("Space"); // the pen is down
  for (let i = 0; i < 12; i++) await keyboard.press("ArrowDown");
  await keyboard.press("Space");
  await visit.shot("keyboard");
  await keyboard.press("Enter");
  await visit.status("A model of your own from 1 image,");
  await tabTo(({ id }) => id === "invert");
  await keyboard.press("Space");
  expect(await visit.page.getByLabel("Swap light and dark").isChecked()).toBe(true);
  await tabTo(({ id }) => id === "save");
  for (const id of ["bundle-folder", "bundle-files"]) await tabTo((found) => found.id === id);
  visit.expectSilence();
  await visit.close();
});

test.each([
  { name: "phone-light", width: 390, colorScheme: "light" as const },
  { name: "phone-dark", width: 390, colorScheme: "dark" as const },
  { name: "phone-narrow", width: 320, colorScheme: "light" as const },
  { name: "desktop-dark", width: 1100, colorScheme: "dark" as const },
])("it fits and can be touched: $name", async ({ name, width, colorScheme }) => {
  const phone = width < 500;
  const size = { width, height: phone ? 844 : 900 };
  const visit = await Visit.start(browser, { viewport: size, colorScheme, hasTouch: phone, isMobile: phone });
  const sample = visit.page.locator(".sample").nth(1);
  await (phone ? sample.tap() : sample.click());
  await visit.status("A model of their own");
  const wide = await visit.page.evaluate(() => document.documentElement.scrollWidth);
  expect(wide).toBeLessThanOrEqual(width);
  if (phone) {
    const small = await visit.page.evaluate(() =>
      [...document.querySelectorAll<HTMLElement>("button, .button, .choice label, .check")]
        .filter((element) => element.offsetParent && element.offsetHeight < 40)
        .map((element) => element.innerText),
    );
    expect(small).toEqual([]);
    expect(await visit.page.locator("#to-answers").isVisible()).toBe(true);
  }
  const dark = await visit.page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  expect(dark).toBe(colorScheme === "dark" ? "rgb(20, 25, 27)" : "rgb(246, 245, 241)");
  await visit.shot(name);
  visit.expectSilence();
  await visit.close();
});
