/** Sample clients to click. */

import type { Sample } from "../samples";
import { make } from "./dom";
import { images } from "./text";
import { thumbnail } from "./thumbnail";

const SHOWN = 8; // images of each

export function showSamples(
  list: HTMLElement,
  samples: Sample[],
  shape: number[],
  onChoose: (sample: Sample) => void,
): void {
  list.replaceChildren(
    ...samples.map((sample, number) => {
      const strip = make("span", { class: "strip", "aria-hidden": "true" });
      const shown = Math.min(SHOWN, sample.labels.length);
      for (let i = 0; i < shown; i++) strip.append(thumbnail(sample.points, i, shape));
      const name = make("strong", {}, `Person ${number + 1}`);
      const about = make("span", { class: "quiet" }, described(sample));
      const button = make("button", { type: "button", class: "sample", "aria-pressed": "false" }, strip, name, about);
      button.addEventListener("click", () => {
        markChosen(list, button);
        onChoose(sample);
      });
      return make("li", {}, button);
    }),
  );
}

/** One of them, or none. */
export function markChosen(list: HTMLElement, chosen: Element | null): void {
  for (const button of list.querySelectorAll("button"))
    button.setAttribute("aria-pressed", String(button === chosen));
}

/** "40 images · rotation 90, classes 1+5" */
function described({ labels, traits }: Sample): string {
  const known = Object.entries(traits).map(([name, value]) => `${name} ${value}`);
  return [images(labels.length), known.join(", ")].filter(Boolean).join(" · ");
}
