// The image on a canvas for each model: pixels of the file or of a window, and a heat map over them.

const STOPS = ["#fed976", "#feb24c", "#fd8d3c", "#fc4e2a", "#e31a1c", "#bd0026"].map((hex) =>
  [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)));
export const OUTSIDE = 0.35; // brightness of pixels that the model did not get

export function bytes(base64) {
  const text = atob(base64);
  const array = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) array[index] = text.charCodeAt(index);
  return array;
}

// Shades of every 16-bit code under a window; code 0 is padding.
function windowTable(image, center, width) {
  const table = new Uint8Array(65536);
  for (let code = 1; code < 65536; code += 1) {
    const value = image.low + ((code - 1) / 65534) * (image.high - image.low);
    const shade = Math.min(1, Math.max(0, (value - center) / width + 0.5));
    table[code] = Math.round(255 * (image.inverted ? 1 - shade : shade));
  }
  return table;
}

export function color(heat) {
  const place = heat * (STOPS.length - 1);
  const below = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[below].map((channel, index) => channel + (place - below) * (STOPS[below + 1][index] - channel));
}

export class Viewer {
  constructor(panels, titles) {
    this.panels = titles.map((title) => {
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      const caption = document.createElement("figcaption");
      canvas.setAttribute("role", "img");
      figure.append(canvas, caption);
      panels.append(figure);
      return { title, canvas, caption, overlay: null, note: "" };
    });
    this.opacity = 0.7;
  }

  show(view) {
    this.view = view;
    this.pixels = bytes(view.pixels);
    this.window = view.window;
    this.codes = view.window && new Uint16Array(bytes(view.window.values).buffer);
    this.base = document.createElement("canvas");
    this.base.width = view.width;
    this.base.height = view.height;
    for (const panel of this.panels) {
      panel.canvas.width = view.width;
      panel.canvas.height = view.height;
    }
    this.clearMaps();
    this.paintWindow(null);
  }

  // center and width of a window, or null for the image as its file renders it
  paintWindow(window) {
    const table = window && windowTable(this.window, window.center, window.width);
    const target = new ImageData(this.view.width, this.view.height);
    const { channels } = this.view;
    for (let index = 0; index < target.data.length / 4; index += 1) {
      for (let channel = 0; channel < 3; channel += 1) {
        const own = this.pixels[channels === 3 ? 3 * index + channel : index];
        target.data[4 * index + channel] = table ? table[this.codes[index]] : own;
      }
      target.data[4 * index + 3] = 255;
    }
    this.base.getContext("2d").putImageData(target, 0, 0);
    this.paint();
  }

  setMap(number, map, text) {
    const panel = this.panels[number];
    const codes = bytes(map.map);
    const image = new ImageData(map.width, map.height);
    const outside = new ImageData(map.width, map.height);
    for (let index = 0; index < codes.length; index += 1) {
      const heat = Math.max(0, codes[index] - 1) / 254;
      image.data.set([...color(heat), 255 * heat ** 0.6], 4 * index);
      outside.data[4 * index + 3] = codes[index] ? 0 : 255 * (1 - OUTSIDE);
    }
    panel.overlay = [image, outside].map((data) => {
      const canvas = document.createElement("canvas");
      canvas.width = map.width;
      canvas.height = map.height;
      canvas.getContext("2d").putImageData(data, 0, 0);
      return canvas;
    });
    panel.peak = map.peak;
    const [low, high, mean] = [map.low, map.high, map.mean].map((value) => value.toPrecision(2).replace("-", "−"));
    panel.note = `“${text}” is highest in the ${map.place} of the image (${low} to ${high}, mean ${mean}).`;
    this.paint();
  }

  clearMaps(note = "") {
    for (const panel of this.panels) {
      panel.overlay = null;
      panel.note = note;
    }
    if (this.view) this.paint();
  }

  // Marks the highest place of a map.
  ring(context, across, down) {
    const size = Math.max(this.view.width, this.view.height) / 40;
    context.globalAlpha = 1;
    for (const [style, width] of [["#000", size / 3], ["#fff", size / 7]]) {
      context.beginPath();
      context.arc(across * this.view.width, down * this.view.height, size, 0, 2 * Math.PI);
      context.strokeStyle = style;
      context.lineWidth = width;
      context.stroke();
    }
  }

  paint() {
    for (const panel of this.panels) {
      const context = panel.canvas.getContext("2d");
      context.globalAlpha = 1;
      context.drawImage(this.base, 0, 0);
      if (panel.overlay) {
        const [heat, outside] = panel.overlay;
        context.globalAlpha = this.opacity;
        context.drawImage(outside, 0, 0, this.view.width, this.view.height);
        context.drawImage(heat, 0, 0, this.view.width, this.view.height);
        if (this.opacity > 0 && panel.peak) this.ring(context, ...panel.peak);
      }
      const title = document.createElement("b");
      title.textContent = this.panels.length > 1 ? `${panel.title} ` : "";
      panel.caption.replaceChildren(title, panel.note);
      const what = panel.overlay ? `Image with a heat map. ${panel.note}` : "Image";
      panel.canvas.setAttribute("aria-label", this.panels.length > 1 ? `${panel.title}: ${what}` : what);
    }
  }
}
