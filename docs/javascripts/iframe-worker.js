// The search runs in a worker, and browsers start none from a file on the disk. There, a hidden frame runs its script:
// messages go to and fro as events, and `importScripts` adds scripts to the frame one after the other.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.src = new URL(source, document.baseURI);
          script.onload = resolve;
          script.onerror = () => reject(new Error(`${source} cannot be loaded`));
          scope.document.head.append(script);
        });
      scope.importScripts = async (...sources) => {
        for (const source of sources) await load(source);
      };
      scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.started = load(address);
      this.started.catch((error) => {
        const event = new ErrorEvent("error", { message: error.message, filename: String(address), error });
        this.dispatchEvent(event);
        this.onerror?.(event);
      });
    }

    postMessage(data) {
      const copy = structuredClone(data);
      const scope = this.frame.contentWindow;
      this.started.then(() => scope.dispatchEvent(new scope.MessageEvent("message", { data: copy })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
