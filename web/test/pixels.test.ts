import { describe, expect, test } from "vitest";
import { placeOn } from "../src/view/map";
import { drawingToPoint, inverted, type Picture, toPoint } from "../src/pixels";

/** Gray values, row by row, as a picture. */
function picture(width: number, values: number[]): Picture {
  const data = Uint8Array.from(values.flatMap((value) => [value, value, value, 255]));
  return { width, height: values.length / width, data };
}

describe("a picture as a point", () => {
  const values = Array.from({ length: 16 }, (_, i) => 16 * i);

  test("keeps its bytes where it has the right size", () => {
    expect([...toPoint(picture(4, values), [1, 4, 4])]).toEqual(values);
    expect([...toPoint(picture(4, values), [3, 4, 4])]).toEqual([...values, ...values, ...values]);
  });

  test("has the mean of what each pixel covers", () => {
    expect([...toPoint(picture(4, values), [1, 2, 2])]).toEqual([40, 72, 168, 200]);
    const third = [...toPoint(picture(3, [0, 90, 240, 0, 90, 240, 0, 90, 240]), [1, 2, 2])];
    expect(third).toEqual([30, 190, 30, 190]); // one pixel and a half each
  });

  test("is the middle where the sides have another proportion", () => {
    expect([...toPoint(picture(4, [9, 1, 2, 9, 9, 3, 4, 9]), [1, 2, 2])]).toEqual([1, 2, 3, 4]);
  });

  test("repeats pixels where it is too small", () => {
    expect([...toPoint(picture(1, [7]), [1, 2, 2])]).toEqual([7, 7, 7, 7]);
  });

  test("is gray as Pillow makes it", () => {
    const colours = Uint8Array.from([255, 0, 0, 255, 0, 255, 0, 255, 0, 0, 255, 255, 12, 200, 77, 255]);
    expect([...toPoint({ width: 2, height: 2, data: colours }, [1, 2, 2])]).toEqual([76, 150, 29, 130]);
  });
});

describe("a drawing as a point", () => {
  const pad = (...ink: number[]) => picture(20, Array.from({ length: 400 }, (_, i) => (ink.includes(i) ? 255 : 0)));

  test("is the same wherever it is on the pad", () => {
    const [here, there] = [pad(21, 41, 61, 62), pad(210, 230, 250, 251)];
    expect(drawingToPoint(here, [1, 8, 8])).toEqual(drawingToPoint(there, [1, 8, 8]));
    expect(Math.max(...drawingToPoint(here, [1, 8, 8])!)).toBe(255);
  });

  test("is none where nothing is drawn", () => {
    expect(drawingToPoint(pad(), [1, 8, 8])).toBeNull();
  });
});

test("light and dark change places", () => {
  expect([...inverted(Uint8Array.from([0, 1, 255]))]).toEqual([255, 254, 0]);
});

test("a position has its place on the map, from the left and from the top", () => {
  const map = { low: [-2, 0] as [number, number], high: [2, 10] as [number, number], counts: [[1]] };
  expect(placeOn(map, [-2, 0])).toEqual([0, 1]);
  expect(placeOn(map, [1, 10])).toEqual([0.75, 0]);
  expect(placeOn(map, [6, 5])).toEqual([2, 0.5]);
});
