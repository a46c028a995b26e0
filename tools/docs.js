// From disk (file:) a browser starts no worker, and search would find nothing: there a hidden frame does its work.
// The theme asks for it by this name.
window.IFrameWorker = class extends EventTarget {
  constructor(address) {
    super()
    const frame = document.body.appendChild(document.createElement("iframe"))
    frame.hidden = true
    this.inside = frame.contentWindow
    addEventListener("message", ({source, data}) => {
      if (source === this.inside) this.dispatchEvent(new MessageEvent("message", {data}))
    })
    this.inside.document.open()
    this.inside.document.write(`<script>
      postMessage = data => parent.postMessage(data, "*")
      importScripts = (...addresses) => addresses.reduce((before, src) => before.then(() => new Promise(loaded => {
        document.body.appendChild(Object.assign(document.createElement("script"), {src, onload: loaded}))
      })), Promise.resolve())
    <\/script><body><script src="${address}"><\/script>`)
    this.inside.document.close()
    this.ready = new Promise(loaded => { this.inside.onload = loaded })
  }
  postMessage(data) { this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data}))) }
  terminate() { this.inside.frameElement.remove() }
}
if (location.protocol === "file:") window.Worker = window.IFrameWorker
