// ---- The stream: the proxy's events, and the reaction to its end ---------------------------------------------------

const stream = {
  source: null, live: false, lostAt: 0, why: '', heardAt: 0, tries: 0, nextAt: 0, timer: 0, loading: false, again: false, meanwhile: [], resting: false,

  open() {
    clearTimeout(this.timer);
    this.close();
    this.nextAt = 0;
    this.heardAt = now();
    const source = this.source = new EventSource('api/events');
    const on = (type, take) => source.addEventListener(type, (event) => {
      if (source !== this.source) return;
      this.heardAt = now();
      const message = JSON.parse(event.data);
      if (type === 'now' && Math.abs(message.at - theirs()) > 2) known.skew = message.at - now();
      take(message);
    });
    on('hello', (message) => this.hello(message));
    on('now', (message) => { takeNow(message); draw('now', 'rows'); });
    on('problems', (message) => {
      Object.assign(known, { looking: Boolean(message.looking), every: message.every || 0 });
      if (message.objects) known.objects = message.objects;
      // The first message precedes the first check, so its empty list does not mean that there are no findings.
      if (message.findings && (!message.looking || message.findings.length)) Object.assign(known, { findings: message.findings, findingsAt: message.lookedAt ?? message.at });
      draw('problems');
    });
    on('flows', (message) => { takeFlows(message); draw('flows'); });
    source.onerror = () => { if (source === this.source) this.lost(); };
    draw('link');
  },

  close() {
    if (this.source) this.source.close();
    this.source = null;
  },

  hello({ facts, revision }) {
    const before = known.facts;
    const restarted = before && before.pid !== facts.pid;
    const again = Boolean(this.lostAt);
    Object.assign(this, { live: true, lostAt: 0, why: '', tries: 0 });
    Object.assign(known, { facts, flowsAt: 0 });
    if (restarted) notice(`kube-proxy was restarted: pid ${before.pid} is now ${facts.pid}`);
    else if (again) notice('connected to the proxy again');
    if (!before || restarted || again) this.loadPast();
    if (restarted || revision !== known.revision || !known.rowsLoaded) this.loadRows();
    draw('link', 'problems', 'rows', 'now', 'again');
  },

  /** Show that the connection ended, and connect again after a time that grows to 2 s. EventSource itself does not retry after errors. */
  lost() {
    this.close();
    if (this.resting) return;
    if (!this.lostAt) this.lostAt = now();
    this.live = false;
    this.tries += 1;
    const wait = Math.min(2, .25 * 2 ** Math.min(this.tries, 3)) * (.75 + Math.random() / 4);
    this.nextAt = now() + wait;
    this.timer = setTimeout(() => this.open(), wait * 1000);
    if (this.tries % 3 === 1) this.ask();
    draw('link');
  },

  /** Find the reason for a failed connection with a plain request, because an EventSource gives no reason. */
  async ask() {
    try {
      const answer = await fetch('api/facts', { cache: 'no-store' });
      this.why = answer.ok ? 'the proxy answers, but not the stream: too many pages may be open' : (await answer.text()).trim();
    } catch {
      this.why = 'nothing answers at this address';
    }
    draw('link');
  },

  async loadPast() {
    try { takePast(await getJson('api/journal')); } catch { return; }  // the stream works without the journal
    nowView.last = null;  // all lines are drawn again
    $('feed').replaceChildren();
    draw('now');
  },

  async loadRows() {
    if (this.loading) { this.again = true; return; }
    Object.assign(this, { loading: true, meanwhile: [] });
    try {
      const answer = await getJson('api/services');
      takeAllRows(answer);
      // Messages that arrived while the list was loading may be newer than the list.
      const newer = this.meanwhile.filter((one) => one.revision > answer.revision);
      for (const one of newer) { takeRows(one.rows || [], one.gone || []); known.revision = one.revision; }
    } catch (error) {
      known.rowsError = error.message;
      if (this.live) setTimeout(() => this.loadRows(), 2000);
    }
    this.loading = false;
    draw('rows');
    if (this.again) { this.again = false; this.loadRows(); }
  },

  /** Runs once per second. A running proxy sends a message every second, so silence means that the connection is lost. */
  tick() {
    if (this.source && now() - this.heardAt > (this.live ? 10 : 5)) this.lost();
  },

  /** Close the stream if the page is hidden for five minutes, and open the stream when the page becomes visible. */
  visibility() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => { this.resting = true; this.live = false; clearTimeout(this.timer); this.close(); }, 300000);
    } else if (this.resting || this.nextAt) {  // browsers slow down the timers of hidden tabs
      this.resting = false;
      this.open();
    }
  },
};

/** Return JSON from the proxy. If the proxy refuses the request, the text of its answer is the error's message. */
async function getJson(path, signal) {
  let answer;
  try {
    answer = await fetch(path, { cache: 'no-store', signal });
    if (answer.ok) return await answer.json();
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Error(answer ? 'the answer was cut off: ask again, or ask with `kube-proxy` on the node' : 'the proxy does not answer', { cause: error });
  }
  const error = new Error((await answer.text()).trim() || `the proxy answers ${answer.status}`);
  error.status = answer.status;
  throw error;
}
