/** The images that the models are shown: a sample client's, or the person's own. */

import { MOST } from "./images";
import { type Inputs, pointSize } from "./manifest";
import { inverted } from "./pixels";
import type { Sample } from "./samples";

export class Collection {
  private stored = new Uint8Array();
  labels: number[] = []; // -1: unknown
  ofPerson = false; // and not of a sample
  swapped = false; // light and dark

  constructor(private readonly inputs: Inputs) {}

  get count(): number {
    return this.labels.length;
  }

  /** As the models are to see them. */
  get points(): Uint8Array {
    return this.swapped ? inverted(this.stored) : this.stored.slice();
  }

  take(sample: Sample): void {
    this.stored = sample.points.slice();
    this.labels = [...sample.labels];
    this.ofPerson = this.swapped = false;
  }

  /** Beside the person's own that are here already; how many found no place. */
  add(points: Uint8Array): number {
    if (!this.ofPerson) this.clear();
    this.ofPerson = true;
    const size = pointSize(this.inputs);
    const fitting = points.subarray(0, (MOST - this.count) * size);
    const both = new Uint8Array(this.stored.length + fitting.length);
    both.set(this.stored);
    both.set(fitting, this.stored.length);
    this.stored = both;
    this.labels.push(...new Array<number>(fitting.length / size).fill(-1));
    return (points.length - fitting.length) / size;
  }

  clear(): void {
    this.stored = new Uint8Array();
    this.labels = [];
    this.ofPerson = this.swapped = false;
  }
}
