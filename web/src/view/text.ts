/** Numbers in words. */

/** With one digit, unless it is a whole number. */
export const percent = (share: number): string => `${Number((100 * share).toFixed(1))} %`;

export const bytes = (count: number): string =>
  count < 1000 ? `${count} bytes` : count < 1e6 ? `${(count / 1e3).toFixed(0)} kB` : `${(count / 1e6).toFixed(1)} MB`;

export const time = (ms: number): string =>
  ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(2)} s`;

export const images = (count: number): string => `${count.toLocaleString("en")} image${count === 1 ? "" : "s"}`;
