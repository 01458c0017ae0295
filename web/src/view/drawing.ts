/** A pad to draw on, by pointer or by arrow keys: light strokes on black. */

import { pictureOf } from "../images";
import type { Picture } from "../pixels";

const STEP = 8; // pixels of an arrow key
const ARROWS: Record<string, [number, number]> = {
  ArrowLeft: [-STEP, 0],
  ArrowRight: [STEP, 0],
  ArrowUp: [0, -STEP],
  ArrowDown: [0, STEP],
};

export class DrawingPad {
  private readonly context: CanvasRenderingContext2D;
  private pen: [number, number];
  private down = false;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    onEnter: () => void,
  ) {
    this.context = canvas.getContext("2d", { willReadFrequently: true })!;
    this.pen = [canvas.width / 2, canvas.height / 2];
    this.wipe();
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.pen = this.placeOf(event);
      this.lineTo(this.pen);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (canvas.hasPointerCapture(event.pointerId))
        for (const each of event.getCoalescedEvents?.() ?? [event]) this.lineTo(this.placeOf(each));
    });
    canvas.addEventListener("keydown", (event) => {
      if (event.key === "Enter") onEnter();
      else if (event.key === " ") this.setDown(!this.down);
      else if (ARROWS[event.key]) this.step(ARROWS[event.key]);
      else return;
      event.preventDefault();
    });
    canvas.addEventListener("blur", () => this.setDown(false));
  }

  picture(): Picture {
    return pictureOf(this.context, this.canvas.width, this.canvas.height);
  }

  wipe(): void {
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.setDown(false);
  }

  private setDown(down: boolean): void {
    this.down = down;
    this.canvas.dataset.pen = down ? "down" : "up";
    if (down) this.lineTo(this.pen);
  }

  private step([x, y]: [number, number]): void {
    const { width, height } = this.canvas;
    const to: [number, number] = [clamp(this.pen[0] + x, width), clamp(this.pen[1] + y, height)];
    if (this.down) this.lineTo(to);
    this.pen = to;
    const { style } = this.canvas.parentElement!; // where the pen is shown
    style.setProperty("--pen-x", `${(100 * to[0]) / width}%`);
    style.setProperty("--pen-y", `${(100 * to[1]) / height}%`);
  }

  private lineTo(to: [number, number]): void {
    this.context.strokeStyle = "#fff";
    this.context.lineWidth = this.canvas.width / 7;
    this.context.lineCap = this.context.lineJoin = "round";
    this.context.beginPath();
    this.context.moveTo(...this.pen);
    this.context.lineTo(...to);
    this.context.stroke();
    this.pen = to;
  }

  private placeOf(event: PointerEvent): [number, number] {
    const box = this.canvas.getBoundingClientRect();
    const share = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    return [share[0] * this.canvas.width, share[1] * this.canvas.height];
  }
}

const clamp = (value: number, most: number): number => Math.min(most, Math.max(0, value));
