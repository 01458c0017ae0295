import { chromium } from "playwright-core";
const [url, out] = process.argv.slice(2);
const b = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--headless","--no-sandbox","--disable-gpu","--disable-quic","--no-first-run","--disable-background-networking","--disable-component-update","--disable-sync"] });
for (const [name, o] of [["desktop", {viewport:{width:1100,height:900}}],["phone-dark",{viewport:{width:390,height:844}, colorScheme:"dark", deviceScaleFactor:2}]]) {
  const c = await b.newContext(o); const p = await c.newPage();
  p.on("console", m => console.log(name, m.type(), m.text())); p.on("pageerror", e => console.log("ERR", e.message));
  p.on("request", r => console.log(r.method(), r.url()));
  await p.goto(url);
  await p.getByText("Ready.").waitFor({timeout:20000});
  console.log("READY");
  await p.locator(".sample").nth(1).click();
  await p.locator(".figure").first().waitFor({timeout:20000});
  console.log(await p.locator("#status").textContent(), await p.locator("#figures").textContent(), await p.locator("#times").innerText());
  console.log(await p.evaluate(() => fetch("bundle/manifest.json").then(r=>"OPEN "+r.status, e=>"blocked "+e)));
  console.log(await p.workers()[0].evaluate((u) => fetch(u+"bundle/manifest.json").then(r=>"OPEN "+r.status, e=>"blocked "+e), url));
  console.log(await p.locator("#sent-text").textContent());
  await p.screenshot({path: `${out}-${name}.png`, fullPage: true});
}
await b.close();
