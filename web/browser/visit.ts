/** A visit to the page in a real Chromium: what is asked for, said and seen. */

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { type Browser, type BrowserContextOptions, chromium, type Page } from "playwright-core";
import { expect, inject } from "vitest";

const FLAGS = [
  "--headless",
  "--no-sandbox",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

const SOFTWARE_GPU = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"];

/** Without a graphics card, or with one of software. */
export const launch = (gpu: "none" | "software" = "none"): Promise<Browser> =>
  chromium.launch({
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: [...FLAGS, ...(gpu === "none" ? ["--disable-gpu"] : SOFTWARE_GPU)],
  });

interface Predictions {
  names: string[];
  probabilities: number[];
}

/** What Python says of some images. */
export interface Known {
  own: Predictions;
  everyone: Predictions;
  familiarity: { score: number; threshold: number; foreign: boolean } | null;
}

interface AllKnown {
  samples: Known[];
  inverted: Known;
  one: Known;
  many: Known;
  cnn: Known;
}

export const known = (): AllKnown =>
  JSON.parse(readFileSync(join(inject("known"), "known.json"), "utf8")) as AllKnown;

/** The path of an image of `tests/web/fixtures.py`. */
export const image = (name: string, number: number): string =>
  join(inject("known"), "images", `${name}-${String(number).padStart(4, "0")}.png`);

export class Visit {
  readonly loaded: string[] = []; // until the page is ready
  readonly requests: string[] = []; // since the page is ready
  readonly refused: string[] = []; // of these, those that the policy kept from being sent
  readonly errors: string[] = [];
  private ready = false;

  private constructor(readonly page: Page) {
    page.on("request", (request) => (this.ready ? this.requests : this.loaded).push(request.url()));
    page.on("requestfailed", (request) => request.failure()?.errorText === "csp" && this.refused.push(request.url()));
    page.on("pageerror", (error) => this.errors.push(error.message));
    page.on("console", (message) => {
      if (["error", "warning"].includes(message.type())) this.errors.push(message.text());
    });
  }

  /** From an empty page until the sample is loaded; `headers: false` takes the server's policy away. */
  static async start(
    browser: Browser,
    options: BrowserContextOptions = {},
    query = "",
    { headers } = { headers: true },
  ): Promise<Visit> {
    const context = await browser.newContext({ viewport: { width: 1100, height: 900 }, ...options });
    if (!headers)
      await context.route("**/*", async (route) => {
        const response = await route.fetch();
        const { "content-security-policy": _, ...others } = response.headers();
        await route.fulfill({ response, headers: others });
      });
    const visit = new Visit(await context.newPage());
    await visit.page.goto(inject("url") + query);
    await visit.status("Ready");
    visit.ready = true;
    return visit;
  }

  /** Until the page says so. */
  status(text: string | RegExp): Promise<void> {
    return this.page.locator("#status", { hasText: text }).waitFor({ timeout: 100_000 });
  }

  sample(number: number): Promise<void> {
    return this.page.locator(".sample").nth(number).click();
  }

  choose(files: string | string[]): Promise<void> {
    return this.page.locator("#files").setInputFiles(files);
  }

  /** Another bundle, or the same with some file changed: against its SHA256SUMS, or along with it. */
  async openBundle(
    folder: string,
    change: (name: string, content: Buffer) => Buffer = (_, c) => c,
    how: "against its sums" | "with its sums" = "against its sums",
  ): Promise<void> {
    const sums = readFileSync(join(folder, "SHA256SUMS"), "utf8");
    const names = [...sums.matchAll(/ {2}(\S+)\n/g)].map((found) => found[1]);
    const contents = names.map((name) => change(name, readFileSync(join(folder, name))));
    const own = names.map((name, i) => `${createHash("sha256").update(contents[i]).digest("hex")}  ${name}\n`).join("");
    const files = [...names, "SHA256SUMS"].map((name, i) => ({
      name,
      mimeType: "application/octet-stream",
      buffer: contents[i] ?? Buffer.from(how === "with its sums" ? own : sums),
    }));
    await this.page.locator("#bundle-files").setInputFiles(files);
  }

  notes(): Promise<string> {
    return this.page.locator("#notes").innerText();
  }

  /** All answers, as the person would save them. */
  async answers(): Promise<Record<string, string>[]> {
    const [download] = await Promise.all([
      this.page.waitForEvent("download"),
      this.page.getByRole("button", { name: "Save all answers" }).click(),
    ]);
    const [head, ...lines] = readFileSync(await download.path(), "utf8").trimEnd().split("\n");
    const names = head.split(",");
    return lines.map((line) => Object.fromEntries(line.split(",").map((value, i) => [names[i], value])));
  }

  /** The page's answers are Python's, for every image and both models. */
  async expectAnswersOf(python: Known): Promise<void> {
    const found = await this.answers();
    expect(found).toHaveLength(python.own.names.length);
    for (const model of ["own", "everyone"] as const) {
      expect(found.map((row) => row[model])).toEqual(python[model].names);
      const away = found.map((row, i) => Math.abs(Number(row[`${model}_probability`]) - python[model].probabilities[i]));
      expect(Math.max(...away)).toBeLessThan(1e-4);
    }
    expect(await this.page.locator("#warning").isVisible()).toBe(python.familiarity?.foreign ?? false);
  }

  /** Nothing was sent and nothing went wrong. */
  expectSilence(): void {
    expect(this.requests.filter((url) => !url.startsWith("blob:"))).toEqual([]);
    expect(this.errors).toEqual([]);
  }

  async shot(name: string): Promise<void> {
    await this.page.screenshot({ path: join(inject("shots"), `${name}.png`), fullPage: true });
  }

  close(): Promise<void> {
    return this.page.context().close();
  }
}
