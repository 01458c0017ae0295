/** The page: what a person does, and what is shown for it. */

import { Collection } from "./collection";
import { droppedFiles } from "./dropped";
import type { Engine } from "./engine";
import { type Files, SUMS } from "./files";
import { readImages } from "./images";
import { hasGpu, load, openFiles } from "./loading";
import type { Opened } from "./messages";
import { drawingToPoint } from "./pixels";
import { countRequests } from "./policy";
import type { Sample } from "./samples";
import { showAbout, showRuntimeChoice, showSent } from "./view/about";
import { byId } from "./view/dom";
import { DrawingPad } from "./view/drawing";
import { Results } from "./view/results";
import { markChosen, showSamples } from "./view/samples";
import { images, time } from "./view/text";

const status = byId("status");
const problem = byId("problem");
const sampleList = byId("samples");

/** What is open: a bundle, and the images that it is shown. */
class Session {
  readonly collection: Collection;
  private asked = 0;

  constructor(
    private readonly engine: Engine,
    readonly opened: Opened,
    private readonly results: Results,
  ) {
    this.collection = new Collection(opened.manifest.inputs);
  }

  chooseSample(sample: Sample): Promise<void> {
    this.collection.take(sample);
    showNotes([]);
    return this.personalize();
  }

  async addFiles(files: File[]): Promise<void> {
    const { inputs } = this.opened.manifest;
    const read = await readImages(files, inputs, (done, all) => {
      if (done % 320 === 0 && all > 320) say(`Reading image ${done + 1} of ${all} …`);
    });
    await this.addPoints(read.points, read.notes);
  }

  async addDrawing(pad: DrawingPad): Promise<void> {
    const point = drawingToPoint(pad.picture(), this.opened.manifest.inputs.shape);
    pad.wipe();
    await this.addPoints(point ?? new Uint8Array(), point ? [] : ["The pad is empty: draw on it first."]);
  }

  /** What is being computed is not wanted any more. */
  cancel(): void {
    this.asked++;
    this.results.setBusy(false);
  }

  removeAll(): void {
    this.cancel();
    this.collection.clear();
    this.results.hide();
    showNotes([]);
    this.showTray();
    say("All images are removed.");
  }

  /** Both models' answers, from one look at all images. */
  async personalize(): Promise<void> {
    const own = ++this.asked;
    const { collection } = this;
    this.showTray();
    say(`Making a model from ${images(collection.count)} …`);
    this.results.setBusy(true);
    const [points, labels] = [collection.points, [...collection.labels]];
    const start = performance.now();
    try {
      const answers = await this.engine.personalize(points);
      if (own !== this.asked) return;
      const took = performance.now() - start;
      const { manifest } = this.opened;
      const whose = collection.ofPerson ? "your" : "their";
      this.results.show(manifest, { inputs: manifest.inputs, points, labels, answers, whose });
      fail("");
      say(`A model of ${whose} own from ${images(labels.length)}, in ${time(took)}.`);
    } catch (error) {
      if (own !== this.asked) return;
      this.results.hide();
      fail(`No model could be made: ${(error as Error).message}. Try fewer images.`);
    } finally {
      if (own === this.asked) this.results.setBusy(false);
    }
  }

  private async addPoints(points: Uint8Array, notes: string[]): Promise<void> {
    const before = this.collection.count;
    const left = points.length ? this.collection.add(points) : 0;
    showNotes(left ? [...notes, `${images(left)} found no place.`] : notes);
    if (points.length) {
      markChosen(sampleList, null);
      await this.personalize();
    } else if (!before) say("There are no images yet.");
    else say(`${images(before)}, as before.`);
  }

  private showTray(): void {
    const { collection } = this;
    byId("tray").hidden = !collection.count;
    byId("tray-text").textContent = `${images(collection.count)} ${collection.ofPerson ? "of your own" : "of a sample"}.`;
    byId<HTMLInputElement>("invert").checked = collection.swapped;
  }
}

const say = (text: string): void => void (status.textContent = text);

function fail(text: string): void {
  problem.hidden = !text;
  problem.textContent = text;
  if (text) say("");
}

const notTaken = (error: Error): void => fail(`These files could not be taken: ${error.message}. Try fewer, or others.`);

function showNotes(notes: string[]): void {
  byId("notes").replaceChildren(...notes.map((note) => Object.assign(document.createElement("li"), { textContent: note })));
}

/** Everything that a person can do; `session` is what is open then. */
function listen(session: () => Session | null, open: (files: File[]) => void): void {
  const take = (files: File[]): void => {
    if (!files.length) return;
    if (files.some((file) => file.name === SUMS)) open(files);
    else void session()?.addFiles(files).catch(notTaken);
  };
  const addDrawing = (): void => void session()?.addDrawing(pad).catch(notTaken);
  const pad = new DrawingPad(byId<HTMLCanvasElement>("pad"), addDrawing);
  byId("add-drawing").addEventListener("click", addDrawing);
  byId("clear-drawing").addEventListener("click", () => pad.wipe());
  byId("remove-all").addEventListener("click", () => {
    markChosen(sampleList, null);
    session()?.removeAll();
  });
  byId<HTMLInputElement>("invert").addEventListener("change", (event) => {
    const own = session();
    if (!own) return;
    own.collection.swapped = (event.target as HTMLInputElement).checked;
    void own.personalize();
  });
  const inputs: [string, (files: File[]) => void][] = [["files", take], ["bundle-files", open], ["bundle-folder", open]];
  for (const [id, use] of inputs) {
    const input = byId<HTMLInputElement>(id);
    input.addEventListener("change", () => {
      use([...(input.files ?? [])]);
      input.value = ""; // so that the same file may be chosen again
    });
  }
  document.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
  const drop = byId("drop");
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) drop.classList.remove("over");
  });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer) droppedFiles(event.dataTransfer).then(take).catch(notTaken);
  });
}

async function start(): Promise<void> {
  const results = new Results();
  const asked = new URLSearchParams(location.search).get("runtime") === "webgpu";
  const name = asked && (await hasGpu()) ? "webgpu" : "wasm";
  let session: Session | null = null;
  const loaded = await load(name);
  showSent(0);
  countRequests(showSent);

  const open = async (files: Files): Promise<void> => {
    say("Checking the model …");
    try {
      const opened = await loaded.engine.open(files);
      session?.cancel();
      session = new Session(loaded.engine, opened, results);
    } catch (error) {
      return fail(`This model cannot be used: ${(error as Error).message}.`);
    }
    const { manifest, samples, times } = session.opened;
    fail("");
    results.hide();
    byId("images").hidden = false;
    byId("samples-part").hidden = !samples.length;
    byId("tray").hidden = true;
    showNotes([]);
    showSamples(sampleList, samples, manifest.inputs.shape, (sample) => void session?.chooseSample(sample));
    showAbout(manifest, files, loaded, times);
    say(samples.length ? "Ready. Choose a person, or take your own images." : "Ready. Take some images.");
  };

  listen(
    () => session,
    (files) => void openFiles(files).then(open).catch(notTaken),
  );
  showRuntimeChoice(name, asked);
  if (loaded.files) await open(loaded.files);
  else fail("There is no model beside this page: open one below, or see how to export one.");
}

start().catch((error: Error) => fail(`The page could not be loaded: ${error.message}. Reload it.`));
