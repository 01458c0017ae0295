/** What both models say of each image, and how often they are right where that is known. */

import { decide } from "../bundle";
import type { Answers } from "../messages";
import { type Inputs, classNames } from "../manifest";
import { make } from "./dom";
import { images, percent } from "./text";
import { thumbnail } from "./thumbnail";

const PAGE = 24; // images that are shown at once

export interface Shown {
  inputs: Inputs;
  points: Uint8Array;
  labels: number[]; // -1: unknown; as many as images
  answers: Answers;
  whose: "your" | "their"; // own model it is
}

type Decision = ReturnType<typeof decide>[number];

/** One person's answers; `show` more of them as asked for. */
export class AnswerList {
  private shown = 0;
  private readonly own: Decision[];
  private readonly everyone: Decision[];
  private readonly names: string[];

  constructor(
    private readonly data: Shown,
    private readonly list: HTMLElement,
    private readonly more: HTMLElement,
  ) {
    const { classes } = data.inputs;
    this.own = decide(data.answers.own, classes);
    this.everyone = decide(data.answers.everyone, classes);
    this.names = classNames(data.inputs);
    list.replaceChildren();
  }

  showMore(): void {
    const end = Math.min(this.shown + PAGE, this.own.length);
    for (; this.shown < end; this.shown++) this.list.append(this.tile(this.shown));
    const left = this.own.length - end;
    this.more.hidden = !left;
    this.more.textContent = left <= PAGE ? `Show the other ${images(left)}` : `Show ${PAGE} more of ${images(left)}`;
  }

  /** Two figures: how often each model is right, or how often they differ. */
  figures(): HTMLElement[] {
    const { whose } = this.data;
    const known = this.data.labels.flatMap((label, i) => (label >= 0 ? [i] : []));
    if (!known.length) {
      const other = this.own.filter((d, i) => d.class !== this.everyone[i].class).length;
      const sure = this.own.reduce((sum, d) => sum + d.p, 0) / this.own.length;
      return [
        figure("own", `${other} of ${this.own.length}`, `answered otherwise by ${whose} own model`),
        figure("own", percent(sure), `is how sure ${whose} own model is, on average`),
      ];
    }
    const right = (found: Decision[]): number =>
      known.filter((i) => found[i].class === this.data.labels[i]).length;
    const of = (count: number): string => `${count} of ${known.length} right`;
    const [own, everyone] = [right(this.own), right(this.everyone)];
    return [
      figure("own", percent(own / known.length), `${whose} own model`, of(own), own / known.length),
      figure("everyone", percent(everyone / known.length), "the model for everyone", of(everyone), everyone / known.length),
    ];
  }

  /** A line per image, for a spreadsheet. */
  csv(used: "own" | "everyone"): string {
    const lines = this.own.map((own, i) => {
      const all = this.everyone[i];
      const name = (c: number): string => quoted(this.names[c]);
      const chosen = used === "own" ? own : all;
      return [i, name(chosen.class), name(own.class), own.p.toFixed(6), name(all.class), all.p.toFixed(6)].join(",");
    });
    return ["image,answer,own,own_probability,everyone,everyone_probability", ...lines, ""].join("\n");
  }

  private tile(i: number): HTMLElement {
    const [own, all, label] = [this.own[i], this.everyone[i], this.data.labels[i]];
    const picture = thumbnail(this.data.points, i, this.data.inputs.shape, `Image ${i + 1}`);
    const row = (who: string, words: string, found: Decision): HTMLElement =>
      make(
        "p",
        { class: `answer ${who}${found.class === label ? " right" : label >= 0 ? " wrong" : ""}` },
        make("span", { class: "who" }, words),
        make("strong", {}, this.names[found.class]),
        ...(label < 0 ? [] : [mark(found.class === label)]),
        make("span", { class: "sure" }, `${Math.round(100 * found.p)} %`),
      );
    const differs = own.class === all.class ? "" : "differs";
    return make("li", { class: differs }, picture, row("own", "own", own), row("everyone", "all", all));
  }
}

function mark(right: boolean): HTMLElement {
  return make("span", { class: "mark", role: "img", "aria-label": right ? "right" : "wrong" }, right ? "✓" : "✗");
}

function figure(who: string, value: string, words: string, detail = "", share?: number): HTMLElement {
  const element = make("div", { class: `figure ${who}` }, make("strong", {}, value), make("span", {}, words));
  if (detail) element.append(make("span", { class: "quiet" }, detail));
  if (share !== undefined)
    element.append(make("meter", { min: "0", max: "1", value: String(share), "aria-label": words }));
  return element;
}

const quoted = (name: string): string => (/[",\n]/.test(name) ? `"${name.replaceAll('"', '""')}"` : name);
