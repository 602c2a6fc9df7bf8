// ---- The known state: filled by the stream, read by the views ---------------------------------------------------------

const known = {
  facts: null, revision: -1, rows: new Map(), sorted: [], order: 0, rowsLoaded: false, rowsError: '',
  families: [], conntrack: null, queued: 0, perSecond: 0, lag: null, lastChange: 0,
  findings: null, findingsAt: 0, looking: false, every: 0, objects: [],
  flows: new Map(), flowsError: '', flowsAt: 0, flowsSince: 0, sampled: 1, newPerSecond: 0,
  feed: [], seconds: [], skew: 0,
};

/** The page's object for a Service, from a Row of page/news.py. `hay` is the text that the search tests. */
function makeRow([name, state, ready, total, type, flags, addresses, changedAt, unserved]) {
  const slash = name.indexOf('/');
  return {
    name, namespace: name.slice(0, slash), short: name.slice(slash + 1), state, ready, total, type, flags, addresses, changedAt, unserved,
    used: flags.includes('N') ? 0 : ready,
    hay: `${name} ${addresses.join(' ')} ${type} ${state}`.toLowerCase(),
  };
}

function takeAllRows(answer) {
  known.rows = new Map(answer.services.map((row) => [row[0], makeRow(row)]));
  known.revision = answer.revision;
  known.rowsLoaded = true;
  known.rowsError = '';
  sortRows();
}

function sortRows() {
  known.sorted = [...known.rows.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
  known.order += 1;
}

function takeRows(rows, gone) {
  let others = gone.length > 0;
  for (const raw of rows) {
    const row = makeRow(raw), before = known.rows.get(row.name);
    // The object is updated in place, so that lists that already contain the object show its new values.
    if (before) Object.assign(before, row);
    else { known.rows.set(row.name, row); others = true; }
  }
  for (const name of gone) { known.rows.delete(name); known.flows.delete(name); }
  if (others) sortRows(); else known.order += 1;
}

/** Return the charts' entry for the second of a time; seconds without changes have entries, too. */
function second(at) {
  const t = Math.floor(at), seconds = known.seconds;
  let last = seconds.length ? seconds[seconds.length - 1].t : t - 1;
  if (t - last > SPAN) { seconds.length = 0; last = t - 1; }
  while (last < t) {
    last += 1;
    const before = seconds.length ? seconds[seconds.length - 1].conntrack : null;
    seconds.push({ t: last, changes: 0, p50: null, p99: null, max: null, conntrack: before });
  }
  while (seconds.length > SPAN + 2) seconds.shift();
  return seconds[Math.max(0, seconds.length - 1 - (last - t))];
}

function takeNow(message) {
  const bucket = second(message.at), lag = message.lagMs || {};
  const changes = message.changes || [], left = message.left || 0;
  bucket.changes += changes.length + left;
  for (const key of ['p50', 'p99', 'max']) {
    if (lag[key] !== null && lag[key] !== undefined) bucket[key] = Math.max(bucket[key] ?? 0, lag[key]);
  }
  if (message.conntrack) bucket.conntrack = message.conntrack.count;
  Object.assign(known, {
    conntrack: message.conntrack,
    facts: known.facts && message.unready ? { ...known.facts, unready: message.unready, ready: !Object.keys(message.unready).length } : known.facts,
    families: message.families || [], queued: message.queued, perSecond: message.perSecond,
  });
  if (changes.length) { known.lag = message.lagMs; known.lastChange = changes[changes.length - 1].at; }
  if (left) known.feed.push({ left, at: message.at });
  known.feed.push(...changes);
  if (known.feed.length > 400) known.feed.splice(0, known.feed.length - 200);
  if (message.reload) stream.loadRows();
  else takeRows(message.rows || [], message.gone || []);
  if (stream.loading) stream.meanwhile.push(message);
  else if (!message.reload) known.revision = message.revision;
}

/** Insert the journal's changes, which the page missed, before the changes that the stream has sent since. */
function takePast({ changes = [], seconds = [] }) {
  const last = changes.length ? changes[changes.length - 1] : { number: 0, at: 0 }, end = seconds.length ? seconds[seconds.length - 1].t : 0;
  known.feed = [...changes.slice(-200), ...known.feed.filter((one) => (one.left ? one.at > last.at : one.number > last.number))];
  known.seconds = [...seconds, ...known.seconds.filter((one) => one.t > end)];
  known.lastChange = Math.max(known.lastChange, last.at);
}

/** Add a second of new connections. Sparklines also move for Services without new connections. */
function takeFlows(message) {
  known.flowsError = message.error || '';
  known.sampled = message.sampled || 1;
  if (!known.flowsAt) known.flowsSince = message.at;
  known.flowsAt = message.at;
  known.newPerSecond = 0;
  for (const [name, seen] of Object.entries(message.services || {})) {
    known.newPerSecond += seen.new;
    if (!known.flows.has(name)) known.flows.set(name, { spark: new Array(SPARK).fill(0), idle: 0, rate: 0, ends: new Map() });
  }
  for (const [name, flow] of known.flows) stepFlow(name, flow, (message.services || {})[name]);
}

function stepFlow(name, flow, seen) {
  flow.rate = seen ? seen.new : 0;
  flow.idle = seen ? 0 : flow.idle + 1;
  flow.spark.push(flow.rate);
  flow.spark.shift();
  // Shares of about the last minute, because the shares of a single second change too fast to be read.
  for (const [key, weight] of flow.ends) {
    if (weight < .01) flow.ends.delete(key); else flow.ends.set(key, weight * .95);
  }
  for (const [port, ends] of Object.entries(seen ? seen.endpoints : {})) {
    for (const [address, share] of Object.entries(ends)) {
      const key = `${port} ${address}`;
      flow.ends.set(key, (flow.ends.get(key) || 0) + share * seen.new * .05);
    }
  }
  if (flow.idle > SPARK) known.flows.delete(name);
}
