/** All that is shown of one person: warning, figures, answers, map and times. */

import type { Manifest } from "../manifest";
import type { Timed } from "../messages";
import { AnswerList, type Shown } from "./answers";
import { byId, fillList } from "./dom";
import { drawMap, mapText } from "./map";
import { percent, time } from "./text";

const STEPS: Partial<Record<Timed["step"], string>> = {
  read: "Looking at the images",
  build: "Building the model",
  correct: "Fitting it to what occurs often",
  own: "Answers of the own model",
  everyone: "Answers of the model for everyone",
};

export class Results {
  private list: AnswerList | null = null;

  constructor() {
    byId("more").addEventListener("click", () => this.list?.showMore());
    byId("save").addEventListener("click", () => this.save());
    byId("use-everyone").addEventListener("click", () => this.use("everyone"));
    for (const radio of this.radios()) radio.addEventListener("change", () => this.markUsed());
  }

  show(manifest: Manifest, shown: Shown): void {
    byId("results").hidden = byId("to-answers").hidden = false;
    for (const word of document.querySelectorAll("[data-whose]")) word.textContent = shown.whose;
    this.list = new AnswerList(shown, byId("answers"), byId("more"));
    this.list.showMore();
    byId("figures").replaceChildren(...this.list.figures());
    const { verdict, times } = shown.answers;
    this.showVerdict(manifest, verdict);
    const all = times.reduce((sum, { ms }) => sum + ms, 0);
    const rows = times.map(({ step, ms }): [string, string] => [STEPS[step] ?? step, time(ms)]);
    fillList(byId("times"), [...rows, ["All together", time(all)]]);
  }

  hide(): void {
    this.list = null;
    byId("results").hidden = byId("to-answers").hidden = byId("warning").hidden = true;
  }

  setBusy(busy: boolean): void {
    byId("results").setAttribute("aria-busy", String(busy));
  }

  private showVerdict(manifest: Manifest, verdict: Shown["answers"]["verdict"]): void {
    const { familiarity } = manifest;
    byId("map-part").hidden = !familiarity || !verdict;
    byId("warning").hidden = !verdict?.foreign;
    this.use("own");
    if (!familiarity || !verdict) return;
    byId("map").replaceChildren(drawMap(familiarity, verdict));
    byId("map-text").textContent = mapText(familiarity, verdict);
    byId("warning-text").textContent = verdict.foreign
      ? "Nobody with images like these taught the model, so a model made from them may well be wrong. " +
        `(Of people like those who taught it, at most ${percent(familiarity.rate)} get this warning.)`
      : "";
  }

  private radios(): NodeListOf<HTMLInputElement> {
    return document.querySelectorAll<HTMLInputElement>("input[name=model]");
  }

  private used(): "own" | "everyone" {
    return [...this.radios()].find((radio) => radio.checked)?.value === "everyone" ? "everyone" : "own";
  }

  private use(which: "own" | "everyone"): void {
    for (const radio of this.radios()) radio.checked = radio.value === which;
    this.markUsed();
  }

  private markUsed(): void {
    byId("results").dataset.used = this.used();
  }

  private save(): void {
    if (!this.list) return;
    const content = new Blob([this.list.csv(this.used())], { type: "text/csv" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(content);
    link.download = "answers.csv";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // when it is surely written
  }
}
