// The script of the page (argument 1) with a document of stubs: a slider is dragged; what was asked is printed.
const vm = require("vm"), fs = require("fs");
const html = fs.readFileSync(process.argv[2], "utf8");
const elements = {};
const element = id => elements[id] ??= {
  value: "", textContent: "", hidden: true, checked: true, disabled: false,
  addEventListener(name, call) { this[name] = call; }, focus() {}, append() {}, setAttribute() {},
};
let inFlight = 0;
const log = [];
let others = 1;  // somebody else's query is explained when the first one comes
const answer = (status, value) => ({ ok: status === 200, status, headers: { get: () => "0.01" }, json: async () => value });
async function fetch(path, options) {
  if (path !== "explain") return answer(200, { d: 2, n: 1, target_recall: 0.9, texts: false, attributes: {}, limits: { k: 1000 } });
  const body = JSON.parse(options.body);
  if (inFlight || others-- > 0) { log.push([503, body.recall]); return answer(503, { error: "busy" }); }
  inFlight++;
  await new Promise(done => setTimeout(done, 100));
  inFlight--;
  log.push([200, body.recall]);
  return answer(200, {});
}
const context = vm.createContext({ document: { getElementById: element }, sessionStorage: { getItem: () => null },
  fetch, setTimeout: (call, ms) => setTimeout(call, ms === 250 ? 50 : ms), clearTimeout, console });
vm.runInContext(/<script>([^]*)<\/script>/.exec(html)[1], context);
const sleep = ms => new Promise(done => setTimeout(done, ms));
(async () => {
  context.show = () => {};
  await sleep(50);
  element("input").value = "1, 2";
  element("recall").value = "0.9";
  element("ask").submit({ preventDefault() {} });
  await sleep(400);
  for (let i = 1; i <= 20; i++) {
    element("recall").value = (0.9 - i / 100).toFixed(2);
    element("recall").change();
    await sleep(2);
  }
  for (let i = 0; i < 5; i++) element("ask").submit({ preventDefault() {} });
  await sleep(1000);
  console.log(JSON.stringify({ log, problem: element("problem").textContent, disabled: element("go").disabled }));
})();
