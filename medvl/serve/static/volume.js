// A volume on a canvas for each model: one axial slice of it under a window, and the slice of a heat map that lies there.

import { OUTSIDE, Viewer, bytes, color } from "./viewer.js";

export const PRESETS = [["Lung", -600, 1500], ["Mediastinum", 50, 350], ["Bone", 400, 1800], ["Pulmonary embolism", 400, 1000]];

export class VolumeViewer extends Viewer {
  show(view) {
    this.view = view;
    this.window = view.window;
    this.values = new Int16Array(bytes(view.values).buffer);
    this.base = document.createElement("canvas");
    this.base.width = view.width;
    this.base.height = view.height;
    this.slice = Math.floor(view.depth / 2);
    for (const panel of this.panels) {
      panel.canvas.width = view.width;
      panel.canvas.height = view.height;
      panel.map = null;
    }
    this.clearMaps();
    this.paintWindow(null);
  }

  // the slice of the file that is shown, from 1
  get place() {
    return Math.floor(((this.slice + 0.5) / this.view.depth) * this.view.slices) + 1;
  }

  setSlice(slice) {
    this.slice = Math.min(this.view.depth - 1, Math.max(0, slice));
    this.paintWindow(this.shown);
  }

  // center and width of a window, or null for that of the model
  paintWindow(window) {
    this.shown = window;
    const { center, width } = window ?? this.window;
    const target = new ImageData(this.view.width, this.view.height);
    const start = this.slice * this.view.width * this.view.height;
    for (let index = 0; index < target.data.length / 4; index += 1) {
      const shade = 255 * ((this.values[start + index] - center) / width + 0.5); // clamped by the array
      target.data.fill(shade, 4 * index, 4 * index + 3);
      target.data[4 * index + 3] = 255;
    }
    this.base.getContext("2d").putImageData(target, 0, 0);
    this.paint();
  }

  setMap(number, map, text) {
    const panel = this.panels[number];
    panel.map = { ...map, codes: bytes(map.map) };
    const [low, high, mean] = [map.low, map.high, map.mean].map((value) => value.toPrecision(2).replace("-", "−"));
    const peak = Math.floor(map.peak[2] * this.view.slices) + 1;
    panel.note = `“${text}” is highest in slice ${peak} of ${this.view.slices}: ${map.place} (${low} to ${high}, mean ${mean}).`;
    this.setSlice(Math.floor(map.peak[2] * this.view.depth));
  }

  clearMaps(note = "") {
    for (const panel of this.panels) panel.map = null;
    super.clearMaps(note);
  }

  // The slice of a map at a share of the depth, between its two nearest planes, as two canvases.
  planes(map, share) {
    const place = Math.min(map.depth - 1, Math.max(0, share * map.depth - 0.5));
    const below = Math.floor(place);
    const above = Math.min(map.depth - 1, below + 1);
    const size = map.width * map.height;
    const heat = new ImageData(map.width, map.height);
    const outside = new ImageData(map.width, map.height);
    const nearest = size * Math.round(place);
    for (let index = 0; index < size; index += 1) {
      const [low, high] = [below, above].map((plane) => Math.max(0, map.codes[plane * size + index] - 1) / 254);
      const value = low + (place - below) * (high - low);
      heat.data.set([...color(value), 255 * value ** 0.6], 4 * index);
      outside.data[4 * index + 3] = map.codes[nearest + index] ? 0 : 255 * (1 - OUTSIDE);
    }
    return [heat, outside].map((data) => {
      const canvas = document.createElement("canvas");
      canvas.width = map.width;
      canvas.height = map.height;
      canvas.getContext("2d").putImageData(data, 0, 0);
      return canvas;
    });
  }

  paint() {
    const share = (this.slice + 0.5) / this.view.depth;
    for (const panel of this.panels) {
      panel.overlay = panel.map && this.planes(panel.map, share);
      const isPeak = panel.map && Math.floor(panel.map.peak[2] * this.view.depth) === this.slice;
      panel.peak = isPeak ? panel.map.peak.slice(0, 2) : null;
    }
    super.paint();
  }
}
