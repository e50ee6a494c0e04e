// Search runs in a worker, and browsers start none for a page opened from disk. There, and only
// there, a hidden frame does the work in its place; a served site has workers as usual.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.answer = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      this.inside.ready = () => {
        this.started = true;
        this.waiting.splice(0).forEach((data) => this.tell(data));
      };
      const prepare = `
        window.postMessage = (data) => window.answer(data);
        window.importScripts = (...urls) =>
          urls.reduce(
            (before, url) =>
              before.then(
                () =>
                  new Promise((done, fail) => {
                    const script = document.createElement("script");
                    script.src = url;
                    script.onload = done;
                    script.onerror = fail;
                    document.body.appendChild(script);
                  }),
              ),
            Promise.resolve(),
          );`;
      const page = this.inside.document;
      const answer = this.inside.answer;
      const ready = this.inside.ready;
      page.open();
      this.inside.answer = answer;
      this.inside.ready = ready;
      page.write(
        `<html><body><script>${prepare}<\/script>` +
          `<script src="${url}" onload="window.ready()"><\/script></body></html>`,
      );
      page.close();
    }

    tell(data) {
      const message = new this.inside.MessageEvent("message", { data });
      this.inside.dispatchEvent(message);
      if (this.inside.onmessage) this.inside.onmessage(message);
    }

    postMessage(data) {
      if (this.started) this.tell(data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
