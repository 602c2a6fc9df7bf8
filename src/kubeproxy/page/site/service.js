// ---- One Service: the way of a connection ---------------------------------------------------------------------------------

const KINDS = { cluster: 'cluster IP', external: 'external IP', loadbalancer: 'load balancer', nodeport: 'NodePort' };
const TREATMENTS = {
  endpoints: ['passed on', 'endpoints see the client', 'all'],
  'endpoints, masqueraded': ['masqueraded', 'endpoints see this node', 'all'],
  'local endpoints': ['passed on, local only', 'endpoints see the client', 'local'],
  'local endpoints, masqueraded': ['masqueraded, local only', 'endpoints see this node', 'local'],
  reject: ['refused', 'the client gets an error at once', ''],
  drop: ['dropped', 'the client gets a timeout', ''],
  'not handled': ['not handled', 'no rule of the proxy applies', ''],
};
const TRACK = 90;  // length of the bar of the largest share
const MOST = 24;   // maximum number of endpoints in the picture; the table contains all endpoints

const serviceView = {
  section: 'service-view', label: 'One Service', name: '', found: null, error: '', port: 0, wait: 0, fetching: null, rowKey: null, logged: null, parts: {},

  enter(name) {
    if (name !== this.name) Object.assign(this, { name, found: null, error: '', port: 0, logged: null });
    this.rowKey = this.keyNow();
    this.shell();
    this.load();
  },

  /** Return the values of the Service's row as a text; if the text changes, the page requests the Service again. */
  keyNow() {
    const row = known.rows.get(this.name);
    return row ? `${row.state} ${row.ready} ${row.total} ${row.changedAt} ${row.unserved}` : '';
  },

  leave() {
    clearTimeout(this.wait);
    this.wait = 0;
    if (this.fetching) this.fetching.abort();
    this.fetching = null;
  },

  shell() {
    const part = (id, node) => { this.parts[id] = node; return node; };
    $('service-view').replaceChildren(
      el('p', { class: 'crumb' }, el('a', { href: servicesView.href }, '\u2190 Services')),
      part('title', el('div', { class: 'title' })), part('sub', el('p', { class: 'dim' })), part('warn', el('ul', { 'aria-label': 'What is wrong with it' })),
      part('main', el('div')), this.askCard(), part('log', el('div')));
    this.drawTitle();
  },

  async load() {
    if (this.fetching) this.fetching.abort();
    const mine = this.fetching = new AbortController();
    try {
      this.found = await getJson(`api/service?name=${encodeURIComponent(this.name)}`, mine.signal);
      this.error = '';
    } catch (error) {
      if (error.name === 'AbortError') return;
      // If the Service no longer exists (404), its state is removed. After any other error, the last known state remains.
      if (error.status === 404) this.found = null;
      this.error = error.message;
    }
    if (this.fetching === mine) this.fetching = null;
    if (current === this) { this.drawTitle(); this.drawMain(); }
  },

  draw(what) {
    const key = this.keyNow();
    // All changes within 120 ms cause one request, so that a Service that changes often costs no more.
    if ((key !== this.rowKey || what.has('again')) && !this.wait) this.wait = setTimeout(() => { this.wait = 0; this.load(); }, 120);
    this.rowKey = key;
    if (what.has('flows') || what.has('rows')) { this.drawTitle(); this.drawLive(); }
    if (what.has('now')) this.drawLog();
  },

  drawTitle() {
    const row = known.rows.get(this.name), found = this.found, [namespace, short] = this.name.split('/');
    const state = (row || found || {}).state || (this.error ? 'unknown' : 'loading'), flow = known.flows.get(this.name);
    const key = JSON.stringify([this.name, state, row && [row.type, row.flags, row.ready, row.total, row.unserved, Math.floor(row.changedAt)], flow && rate(flow.rate), found && found.reason, Math.floor(now() / 10)]);
    if (this.parts.title.key === key) return;
    this.parts.title.key = key;
    const spark = shape('svg', { viewBox: '0 0 120 26', width: 120, height: 26, role: 'img', 'aria-label': 'new connections of the last minute' });
    sparkPaths(flow && flow.spark, 120, 26).forEach((d, place) => spark.append(shape('path', { d, class: place ? 'spark' : 'spark-fill' })));
    this.parts.title.replaceChildren(
      el('h2', {}, el('span', {}, `${namespace}/`), short),
      el('span', { class: 'chip', title: STATES[state] || '' }, el('i', { class: dotOf(state, row) }), state),
      ...(row ? badges(row.flags) : []), ...(flow ? [spark, el('span', { class: 'dim' }, `${rate(flow.rate)} new connections`)] : []));
    const version = found && found.resourceVersion ? `version ${found.resourceVersion}` : '';
    const ends = row ? endsText(row) : '';
    const changed = row && row.changedAt ? `changed ${ago(row.changedAt)}` : '';
    const health = found && found.healthCheck ? `health check port ${found.healthCheck.port}` : '';
    put(this.parts.sub, [row && row.type, ends, changed, version, health].filter(Boolean).join(' · '));
  },

  drawMain() {
    const { found, error, parts } = this;
    parts.warn.replaceChildren(...[error && !found ? this.gone() : null, found && found.reason ? reasonCard(found) : null,
      ...((found && found.problems) || []).map((text) => problemCard({ level: 'warn', what: 'A field of this Service is not used', detail: text }))].filter(Boolean));
    const ports = (found && found.ports) || [];
    this.port = Math.min(this.port, Math.max(0, ports.length - 1));
    const on = document.activeElement && document.activeElement.dataset.port;
    parts.main.replaceChildren(...(ports.length ? [this.wayCard(ports), this.endpointsCard(ports[this.port])] : []));
    this.drawPicture();
    if (on) parts.main.querySelector(`[data-port="${on}"]`)?.focus();
    this.fillAsk(ports);
    this.drawLog();
  },

  gone() {
    return problemCard({ level: 'warn', what: `${this.name}: ${this.error}`, fix: `\`kubectl -n ${this.name.split('/')[0]} get service,endpointslices\`` });
  },

  wayCard(ports) {
    const port = ports[this.port];
    const pick = ports.length > 1 ? ports.map((one, place) => el('button', { class: 'button', type: 'button', 'data-port': place, 'aria-pressed': String(place === this.port), click: () => { this.port = place; this.drawMain(); } }, portLabel(one))) : [el('span', { class: 'dim' }, portLabel(port))];
    const picture = el('div', { class: 'picture', role: 'img', 'aria-label': `The way of a connection to ${this.name}; in words below` });
    // Only a click sets the user's choice; the automatic opening in a narrow window does not.
    const summary = el('summary', { class: 'dim', click: () => { this.inWords = !this.worded.open; } }, 'in words');
    this.worded = el('details', { class: 'ways-card', open: this.inWords || NARROW.matches }, summary, wayWords(port));
    this.picture = picture;
    return el('div', { class: 'card' }, el('h3', {}, 'The way of a connection', el('span', { class: 'filters', role: 'group', 'aria-label': 'Port' }, ...pick)), picture, this.worded);
  },

  /** After a change of the window's width: open the text if the window is narrow, because it then shows no picture. */
  reword() {
    if (this.worded) this.worded.open = this.inWords || NARROW.matches;
  },

  drawPicture() {
    const width = this.picture ? this.picture.clientWidth : 0;
    if (!width || !this.found || !this.found.ports) return;
    const port = this.found.ports[this.port];
    this.picture.replaceChildren(wayPicture(port, targetsOf(this.found, port), Math.max(800, width), this.picture));
    this.drawLive();
  },

  /** Write the endpoints' shares of new connections into picture and table, without building their elements again. */
  drawLive() {
    const flow = known.flows.get(this.name), port = ((this.found && this.found.ports) || [])[this.port];
    // Only connections to the shown port and family count, because an endpoint may belong to several ports.
    const label = port ? `${port.name}/${port.protocol}/${port.family} ` : '', sum = (ends) => ends.reduce((so, [, weight]) => so + weight, 0);
    const ends = flow ? [...flow.ends] : [], total = sum(ends.filter(([key]) => key.startsWith(label))), speed = flow && total ? flow.rate * total / sum(ends) : 0;
    const nodes = $('service-view').querySelectorAll('[data-end]'), shareOf = (node) => (total ? (flow.ends.get(label + node.dataset.end) || 0) / total : null);
    // The largest present or planned share fills its track, so that small shares can be distinguished.
    const most = [...nodes].reduce((so, node) => Math.max(so, node.dataset.as === 'want' ? Number(node.dataset.want) : node.dataset.as === 'bar' ? shareOf(node) || 0 : 0), 0) || 1;
    for (const node of nodes) {
      const share = shareOf(node);
      if (node.dataset.as === 'bar') node.setAttribute('width', String((share || 0) / most * TRACK));
      else if (node.dataset.as === 'want') node.setAttribute('x', String(Number(node.dataset.left) + TRACK * node.dataset.want / most - 1));
      else if (node.dataset.as === 'fan') { node.setAttribute('stroke-width', String(1 + 6 * (share || 0))); node.classList.toggle('hot', Boolean(share)); }
      else put(node, share === null ? (node.dataset.idle ? idleText() : '–') : `${percent(share)}${speed && node.dataset.as === 'long' ? ` · ${rate(share * speed)}` : ''}`);
    }
  },

  endpointsCard(port) {
    const targets = targetsOf(this.found, port), inside = targets.filter((one) => one.in).length;
    const card = el('div', { class: 'card' }, el('h3', {}, 'Endpoints', el('span', { class: 'dim' }, `${count(inside)} ${inside === 1 ? 'gets' : 'get'} new connections${targets.length > inside ? `, ${count(targets.length - inside)} ${targets.length - inside === 1 ? 'does' : 'do'} not` : ''}`)));
    if (!targets.length) card.append(el('p', { class: 'dim' }, 'No EndpointSlice has an endpoint for this port and family.'));
    else card.append(el('div', { class: 'wide' }, endpointTable(targets, 200)));
    return card;
  },

  drawLog() {
    const log = this.parts.log, mine = known.feed.filter((one) => one.service === this.name).slice(-8).reverse();
    if (!log || (mine[0] === this.logged && log.firstChild) || !mine.length) return;
    this.logged = mine[0];
    log.replaceChildren(el('div', { class: 'card' }, el('h3', {}, 'Its last changes', el('span', { class: 'dim' }, 'among the latest of all Services')), el('ol', { class: 'feed' }, ...mine.map(feedLine))));
  },

  askCard() {
    const from = el('input', { name: 'from', value: 'node', autocomplete: 'off', spellcheck: 'false', list: 'sources', required: true });
    const to = el('select', { name: 'to', change: () => this.askOther() });
    const other = el('input', { name: 'other', autocomplete: 'off', spellcheck: 'false', placeholder: '192.0.2.1:80, [2001:db8::1]:53/udp' });
    const answer = el('div', { 'aria-live': 'polite' });
    const list = el('datalist', { id: 'sources' }, el('option', { value: 'node' }, 'this node'));
    const form = el('form', { class: 'ask', submit: (event) => { event.preventDefault(); this.why(from.value.trim(), to.value || other.value.trim(), answer); } },
      el('label', {}, 'From: node, or a client\u2019s address', from), list, el('label', {}, 'To', to), el('label', {}, 'Other address:port', other), el('button', { class: 'button main', type: 'submit' }, 'Why?'));
    Object.assign(this.parts, { from, to, other, answer });
    this.askOther();
    return el('div', { class: 'card' }, el('h3', {}, 'Why?', el('span', { class: 'dim' }, 'what becomes of a connection, and what decides')), form, answer);
  },

  /** Show the field for another address and port if the list's entry for it is chosen. */
  askOther() {
    const { to, other } = this.parts, chosen = !to.value;
    other.parentNode.hidden = !chosen;
    other.required = chosen;
  },

  fillAsk(ports) {
    const options = [...ports.flatMap((port) => port.frontends.flatMap((one) => {
      const proto = port.protocol === 'TCP' ? '' : `/${port.protocol.toLowerCase()}`;
      return askedBy(one.address, port.family).map((address) => [`${address}${proto}`, `${address}${proto}  ${KINDS[one.kind] || one.kind}`]);
    })), ['', 'other address:port']], key = options.join();
    if (this.parts.to.key === key) return;
    this.parts.to.key = key;
    const chosen = this.parts.to.value;
    this.parts.to.replaceChildren(...options.map(([value, text]) => el('option', { value }, text)));
    if (chosen && options.some(([value]) => value === chosen)) this.parts.to.value = chosen;
    this.askOther();
  },

  async why(from, to, answer) {
    put(answer, 'Asking');
    try {
      const told = await getJson(`api/why?from=${encodeURIComponent(from)}&to=${encodeURIComponent(to)}`);
      answer.replaceChildren(...whyAnswer(told));
    } catch (error) {
      answer.replaceChildren(el('p', { class: 'answer bad' }, error.message));
    }
  },

  keys(key) {
    if (key === 'w') { this.parts.from.focus(); this.parts.from.select(); return true; }
    if (key === 'escape') { location.hash = servicesView.href; return true; }
    return false;
  },
};

/** Return the addresses to which clients connect; a NodePort (*:30080) has the addresses of this node. */
function askedBy(address, family) {
  if (!address.startsWith('*')) return [address];
  const own = (known.facts && known.facts.nodePortAddresses || {})[family] || [], port = address.slice(1);
  return own.map((one) => `${one.includes(':') ? `[${one}]` : one}${port}`);
}

const portLabel = (port) => `${port.name ? `${port.name} ` : ''}${(port.frontends[0] || { address: '' }).address.split(':').pop()}/${port.protocol} ${port.family}`;
const affinityWords = (seconds) => `the same client gets the same endpoint within ${duration(seconds)}`;

function reasonCard(found) {
  return problemCard({ level: found.state === 'ignored' ? 'note' : 'bad', what: `${found.state}: ${found.reason}`, detail: found.committed ? 'The kernel still has what it took last.' : '' });
}

/** Return all endpoints of a port: endpoints on this node are first, endpoints without new connections are last. */
function targetsOf(found, port) {
  const local = new Set(port.localEndpoints), pool = new Set([...port.endpoints, ...local]), me = known.facts && known.facts.node;
  const six = port.family === 'IPv6', targets = new Map(), ours = (found.endpoints || []).filter((one) => isSix(one.address) === six);
  const isIt = (one) => one.port === port.name && one.protocol === port.protocol, having = new Set(ours.filter(isIt).map((one) => one.slice));
  const lacks = { why: `its EndpointSlice has no port ${port.name || 'without a name'} (${port.protocol})`, field: 'ports' };
  for (const one of ours) {
    const address = isIt(one) ? one.address : hostOf(one.address);
    // If no container has the named targetPort, the slice contains the endpoint's address, but not the port.
    if (!isIt(one) && having.has(one.slice)) continue;
    targets.set(address, { ...one, address, local: local.has(address) || Boolean(one.node && one.node === me), in: pool.has(address), lacks: isIt(one) ? null : lacks });
  }
  const drained = new Set(port.drainedEndpoints), ejected = port.ejectedEndpoints || {}, wanted = wantedShares(port);
  for (const address of [...pool, ...(port.otherEndpoints || []), ...drained, ...Object.keys(ejected)]) {
    if (!targets.has(address)) targets.set(address, { address, local: local.has(address), in: pool.has(address) });
  }
  const list = [...targets.values()], others = list.some((one) => one.in && one.ready);
  const localOnly = ((known.rows.get(`${found.namespace}/${found.name}`) || {}).flags || '').includes('l') && port.frontends.every((one) => one.kind === 'cluster');
  for (const one of list) {
    const out = ejected[one.address] ? { why: `ejected on this node: ${ejected[one.address]}`, field: 'kube-proxy-py/eject' } : null;
    if (!one.in) Object.assign(one, drained.has(one.address) ? { why: 'drained', field: 'weight 0' } : out || one.lacks || reasonOut(one, others, localOnly));
    else Object.assign(one, { want: wanted.get(one.address), weight: (port.weights || {})[one.address] });
  }
  const rank = (one) => (one.in ? (one.local ? 0 : 1) : 2);
  return list.sort((a, b) => rank(a) - rank(b) || (a.address < b.address ? -1 : 1));
}

const isSix = (address) => address.split(':').length > 2;
/** The address in 10.0.0.1:80, in [fd00::1]:80, or in an address without a port. */
const hostOf = (address) => (address.startsWith('[') ? address.slice(1, address.indexOf(']')) : isSix(address) ? address : address.split(':')[0]);

/** Return the planned share of each endpoint, among all endpoints, or among this node's endpoints if no client gets other endpoints. */
function wantedShares(port) {
  const all = port.frontends.some((one) => ORIGINS.some(([, key]) => (TREATMENTS[one[key]] || [])[2] === 'all'));
  const pool = all ? port.endpoints : port.localEndpoints, weights = (all ? port.weights : port.localWeights) || {};
  const total = pool.reduce((sum, one) => sum + (weights[one] ?? 1), 0);
  return new Map(pool.map((one) => [one, (weights[one] ?? 1) / total]));
}

/** Return the text for an endpoint without new connections. The page does not know connections from before it connected. */
const idleText = () => (!known.flowsAt || known.flowsError ? '–' : known.flowsAt - known.flowsSince < SPARK ? 'none since the page connected' : 'no new connections');

/** Return the reason why an endpoint gets no new connections, and the field of its EndpointSlice that is the cause. */
function reasonOut(one, others, localOnly) {
  if (localOnly && one.slice && !one.local && (one.ready || (one.terminating && one.serving))) {
    return one.node ? { why: `it is on ${one.node}, and the policy is Local`, field: 'nodeName' } : { why: 'its EndpointSlice names no node, and the policy is Local', field: 'endpoints[].nodeName' };
  }
  if (one.terminating && one.serving && others) return { why: 'terminating, while other endpoints are ready', field: 'conditions.terminating' };
  if (one.terminating) return { why: 'terminating', field: 'conditions.serving' };
  if (one.ready === false) return { why: 'not ready', field: 'conditions.ready' };
  const meant = [...(one.forZones || []).map((zone) => `zone ${zone}`), ...(one.forNodes || [])];
  return meant.length ? { why: `its hints name ${meant.join(', ')}`, field: 'hints' } : { why: 'left out', field: '' };
}

const hintsOf = (one) => [...(one.forZones || []), ...(one.forNodes || [])].join(', ');
const whereOf = (one) => [one.node || (one.local ? 'this node' : ''), one.zone, hintsOf(one) && `for ${hintsOf(one)}`, one.weight !== undefined && `weight ${one.weight}`].filter(Boolean).join(' · ');

function standingOf(one) {
  if (one.terminating) return one.serving ? 'terminating, serving' : 'terminating';
  if (one.ready === undefined) return one.in ? 'ready' : '–';
  return one.ready ? 'ready' : 'not ready';
}

function endpointTable(targets, most) {
  const hints = targets.some(hintsOf);
  const head = [['Endpoint'], ['Node', 'opt'], ...(hints ? [['Meant for', 'opt']] : []), ['EndpointSlice', 'opt'], ['Readiness', 'opt'], ['Gets new connections'], ['Of the last minute', 'num']];
  const body = el('tbody'), table = el('table', { class: 'table' }, el('thead', {}, el('tr', {}, ...head.map(([text, name]) => el('th', { scope: 'col', class: name || '' }, text)))), body);
  // In a narrow window, the other properties of an endpoint are below its address.
  const under = (one) => [one.node, one.zone, one.local && 'this node', standingOf(one)].filter((each) => each && each !== '\u2013').join(' · ');
  const line = (one) => el('tr', {}, el('td', { class: 'mono' }, one.address, el('span', { class: 'under' }, under(one))), el('td', { class: 'opt' }, [one.node || '–', one.zone].filter(Boolean).join(', '), one.local ? el('span', { class: 'badge' }, 'this node') : null), hints ? el('td', { class: 'opt' }, hintsOf(one) || 'all') : null,
    el('td', { class: 'opt' }, one.slice || '–'), el('td', { class: 'opt' }, standingOf(one)), el('td', {}, one.in ? `yes${one.weight !== undefined ? `, weight ${one.weight}` : ''}` : `no: ${one.why}`, !one.in && one.field ? el('span', { class: 'opt' }, ` (${one.field})`) : null),
    one.in ? el('td', { class: 'num', 'data-end': one.address, 'data-as': 'long' }, '–') : el('td', { class: 'num' }, '–'));
  body.append(...targets.slice(0, most).map(line));
  if (targets.length > most) {
    const rest = el('button', { class: 'button', type: 'button', click: () => { rest.closest('tr').remove(); body.append(...targets.slice(most).map(line)); } }, `Show ${count(targets.length - most)} more`);
    body.append(el('tr', {}, el('td', { colspan: head.length }, rest)));
  }
  return table;
}

/** Return the picture's content as text, also for screen readers: for each frontend, the action by kind of client. */
function wayWords(port) {
  const list = el('ul', { class: 'ways' });
  for (const front of port.frontends) {
    const sources = front.sources ? `, only from ${front.sources.join(', ') || 'nowhere'}` : '';
    const ways = new Map();
    for (const [id, key, label] of ORIGINS) ways.set(front[key], [...(ways.get(front[key]) || []), [id, label]]);
    const lines = [...ways].map(([action, origins]) => el('div', {}, ...origins.flatMap(([id, label], place) => [place ? ', ' : null, el('i', { class: `k ${id}`, 'aria-hidden': 'true' }), label]),
      `: ${(TREATMENTS[action] || [action]).slice(0, 2).join(', ')}${action.includes('endpoints') ? `, ${plural((action.startsWith('local') ? port.localEndpoints : port.endpoints).length, 'endpoint')}` : ''}`));
    list.append(el('li', {}, el('b', { class: 'mono' }, front.address), ` ${KINDS[front.kind] || front.kind}${sources}`, ...lines));
  }
  if (port.affinitySeconds) list.append(el('li', {}, capital(affinityWords(port.affinitySeconds))));
  return list;
}

const FAILS = ['no', '\u00d7'], MARKS = { fine: ['ok', '\u2713'], broken: FAILS, degraded: FAILS, unknown: ['', '?'] };

function whyAnswer({ heading, why, answer, findings, fixes, next }) {
  const mark = (name, sign, ...content) => el('li', { class: name }, el('span', { class: 'mark', 'aria-label': { ok: 'passes', no: 'does not pass' }[name] || 'note' }, sign), el('div', {}, ...content));
  const steps = why.steps.map((step) => mark(step.passes ? 'ok' : 'no', step.passes ? '\u2713' : '\u00d7', step.text, step.field ? el('span', { class: 'dim mono' }, ` ${step.field}`) : null));
  const ends = why.endpoints.slice(0, 10).map((one) => mark(...(one.returns ? ['', '\u2192'] : ['no', '\u00d7']), `${percent(one.share)} to `, el('span', { class: 'mono' }, one.address), one.node ? ` on ${one.node}` : '', one.zone ? ` in zone ${one.zone}` : '', one.terminating ? ', terminating and serving: used as no endpoint is ready' : '', one.masqueraded ? ', sees this node as the client' : '', one.returns ? '' : ', not masqueraded: its answer does not return through this node'));
  if (why.endpoints.length > 10) ends.push(mark('', '\u2192', `and ${count(why.endpoints.length - 10)} more`));
  const out = (why.missing || []).slice(0, 10).map((one) => mark('', '\u2013', 'not to ', el('span', { class: 'mono' }, one.address), `: ${one.reason}`, el('span', { class: 'dim mono' }, ` ${one.field}${one.slice ? ` in ${one.slice}` : ''}`)));
  if (why.elsewhere) steps.unshift(mark('no', '\u00d7', why.elsewhere.reason, el('span', { class: 'dim mono' }, ` ${why.elsewhere.field}`)));
  const read = findings.map((one) => mark(...(MARKS[one.severity] || ['', '\u2013']), one.why ? `${one.what}: ${one.why}` : one.what));
  return [
    el('p', { class: `answer ${{ yes: 'ok', no: 'bad' }[answer] || ''}` }, heading.replace(' -> ', ' \u2192 ')),
    el('ol', { class: 'steps' }, ...steps, ...ends, ...out, ...read), ...fixes.map(fixLine),
    ...(next ? [el('p', { class: 'dim' }, 'Next: the rules of this node that the packets pass: ', el('code', {}, next))] : []),
  ];
}
