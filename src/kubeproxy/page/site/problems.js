// ---- Problems -------------------------------------------------------------------------------------------------------------

const LEVELS = ['bad', 'warn', 'look', 'unknown', 'note'];
const SEVERITY = { broken: 'bad', degraded: 'warn', unknown: 'unknown', note: 'note' };
const TAGS = { bad: 'broken', warn: 'warning', look: 'to look at', unknown: 'not checked', note: 'note' };
let problemsOf = { key: null, list: [] };

/** Return the present problems, worst first. The list is computed again only if one of its inputs has changed. */
function problemList() {
  const key = [known.order, known.findings, JSON.stringify([known.families, known.facts && known.facts.unready]), fullnessLevel(), known.objects, known.flowsError];
  if (problemsOf.key && key.every((one, place) => one === problemsOf.key[place])) return problemsOf.list;
  const list = [...unready(), ...kernelProblems(), ...serviceProblems(), ...conntrackProblems(), ...objectProblems(), ...flowProblems()];
  const said = list.map((one) => one.detail).join('\n');
  for (const finding of known.findings || []) {
    // doctor also reports the kernel's state; a problem that is already in the list is not added again.
    if (finding.why && said.includes(finding.why)) continue;
    list.push({ level: SEVERITY[finding.severity] || 'note', what: finding.since ? `${finding.what}, since ${clock(Date.parse(finding.since) / 1000)}` : finding.what, detail: finding.why, fix: finding.fix });
  }
  list.sort((a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level));
  problemsOf = { key, list };
  return list;
}

function unready() {
  const parts = known.facts && !known.facts.ready ? Object.entries(known.facts.unready || {}) : [];
  return parts.map(([part, why]) => ({ level: 'bad', what: `the proxy is not ready: ${part}`, detail: why, fix: '`kube-proxy doctor`' }));
}

function kernelProblems() {
  return known.families.flatMap((one) => [
    one.refusal && {
      level: 'bad', what: `${one.family}: the kernel refuses what is planned${one.queued ? `; ${plural(one.queued, 'Service')} wait` : ''}`,
      detail: one.refusal, fix: '`kube-proxy doctor`',
    },
    one.difference && {
      level: 'bad', what: `${one.family}: kernel and plan differ`, detail: one.difference,
      fix: 'the proxy repairs it by itself within seconds; `kube-proxy verify` shows every element; find the program that changes it',
    },
  ].filter(Boolean));
}

function serviceProblems() {
  const refused = [], differ = [], none = [], partly = [];
  for (const row of known.sorted) {
    if (row.state === 'refused') refused.push(row.name);
    else if (row.state === 'differs') differ.push(row.name);
    else if (noEndpoints(row)) (noneReady(row) ? none : partly).push(row);
  }
  const told = known.families.some((one) => one.refusal || one.difference);
  return [
    refused.length && !told && { level: 'bad', what: `${plural(refused.length, 'Service is', 'Services are')} refused by the kernel`, services: refused, more: '#/services?f=trouble', fix: '`kube-proxy verify`' },
    differ.length && !told && { level: 'bad', what: `${plural(differ.length, 'Service is', 'Services are')} not in the kernel as planned`, services: differ, more: '#/services?f=trouble', fix: '`kube-proxy verify`' },
    // Every cluster has Services without endpoints (scaled to 0), which are no error of this node.
    none.length && {
      level: 'look', what: `${plural(none.length, 'Service has', 'Services have')} no available endpoint`, services: none.map((row) => row.name), more: '#/services?f=none',
      detail: 'Clients are refused at once. Open a Service to see which endpoints it has, and why they are out.',
    },
    partly.length && {
      level: 'look', what: `${plural(partly.length, 'Service has', 'Services have')} a port without available endpoint`, services: partly.map((row) => row.name), more: '#/services?f=none',
      detail: `Clients are refused at once: ${partly.slice(0, 12).map((row) => `${row.name} ${row.unserved.join(', ')}`).join('; ')}${partly.length > 12 ? '; …' : ''}`,
    },
  ].filter(Boolean);
}

function conntrackProblems() {
  const share = fullness();
  if (share === null || share < .8) return [];
  const { count: used, max } = known.conntrack;
  return [{
    level: share >= .95 ? 'bad' : 'warn', what: `connection tracking is ${percent(share)} full: ${count(used)} of ${count(max)} entries`,
    detail: 'A full table drops new connections, of Services and of everything else on this node.',
    fix: `\`kube-proxy conntrack\` shows the largest users of the table; sysctl -w net.netfilter.nf_conntrack_max=${max * 2} makes room`,
  }];
}

/** Return the fields that the proxy cannot use. The other fields of these objects take effect, so such a problem is easily overlooked. */
function objectProblems() {
  return known.objects.map(({ object, field, reason }) => {
    const [kind, name = ''] = object.split(' ');
    return { level: 'warn', what: `${object}: ${field} cannot be used`, detail: reason, services: kind === 'Service' && known.rows.has(name) ? [name] : null };
  });
}

function flowProblems() {
  return known.flowsError ? [{ level: 'unknown', what: 'new connections cannot be followed', detail: known.flowsError }] : [];
}

const noneReady = (row) => row.ready === 0 && !/[NT]/.test(row.flags);
/** Whether a port has no available endpoint, as in the metric kubeproxy_services_without_endpoints. */
const noEndpoints = (row) => (noneReady(row) || row.unserved.length > 0) && row.state !== 'ignored' && row.state !== 'deleting' && row.type !== 'ExternalName';
/** A text about the ports without an available endpoint; '' for none. */
const lacking = (row) => (noEndpoints(row) ? `no endpoint is available${noneReady(row) ? '' : ` for ${row.unserved.join(', ')}`}` : '');
/** A text about the ready endpoints. A ready pod is no usable endpoint if its containers lack the port. */
const endsText = (row) => (row.flags.includes('P') && noneReady(row) ? `none of ${plural(row.total, 'endpoint')} has the port` : [`${count(row.ready)} of ${plural(row.total, 'endpoint')} ready${row.flags.includes('N') ? ', none of them on this node' : ''}`, !noneReady(row) && lacking(row)].filter(Boolean).join('; '));
/** The classes of a state's mark; a Service with correct rules but without available endpoints has another mark. */
const dotOf = (state, row) => `dot ${state}${state === 'programmed' && row && noEndpoints(row) ? ' empty' : ''}`;
/** The use of connection tracking in whole percent, or 0 below 80 %, so that the problem does not change with each entry. */
const fullnessLevel = () => (fullness() >= .8 ? Math.round(fullness() * 100) : 0);
const fullness = () => (known.conntrack && known.conntrack.max ? known.conntrack.count / known.conntrack.max : null);

const problemsView = {
  section: 'problems-view', label: 'Problems', chosen: -1, shown: null, asked: null,

  build() { $('look').addEventListener('click', () => this.look()); },

  /** Request a check for problems now; the stream delivers the findings. */
  async look() {
    if (this.waits()) return;
    const asked = this.asked = { since: known.findingsAt, until: now() + 60 };
    this.button();
    try {
      const { after } = await getJson('api/look');
      if (after > 1) notice(`the next check starts in ${duration(after)}`);
    } catch (error) {
      if (this.asked === asked) this.asked = null;
      notice(error.message);
    }
    draw('problems');
  },

  waits() {
    return known.looking || Boolean(this.asked && this.asked.since === known.findingsAt && now() < this.asked.until);
  },

  button() {
    const waits = this.waits(), often = known.every ? `, at the latest after ${duration(known.every)}` : '';
    // The button is not `disabled`, because a disabled button loses the keyboard focus.
    $('look').setAttribute('aria-disabled', String(waits));
    $('look').hidden = !known.facts;
    $('look').title = `A check starts by itself 2 s after the kernel refuses or differs${often}`;
    put($('look'), waits ? 'Looking' : 'Look again');
  },

  enter() { this.shown = null; this.draw(new Set(['enter'])); },

  draw() {
    const list = problemList();
    this.verdict(list);
    this.button();
    this.vitals();
    if (list === this.shown) return;
    // The keyboard focus remains at its place in the list. The list is built again only if a problem begins, ends or changes.
    const at = [...$('problems').children].indexOf(document.activeElement && document.activeElement.closest('.problem'));
    $('problems').replaceChildren(...list.map(problemCard));
    if (at >= 0) ($('problems').children[Math.min(at, list.length - 1)] || $('main')).focus();
    this.shown = list;
  },

  verdict(list) {
    const wrong = list.filter((one) => one.level === 'bad' || one.level === 'warn'), facts = known.facts;
    const level = !facts ? '' : wrong.some((one) => one.level === 'bad') ? 'bad' : wrong.length ? 'warn' : known.findings ? 'ok' : '';
    $('verdict').className = `verdict ${level}`;
    put($('sign'), { ok: '\u2713', warn: '!', bad: '\u00d7', '': '\u2026' }[level]);
    const words = wrong.length ? `${wrong.length === 1 ? '1 thing is' : `${wrong.length} things are`} wrong on ${facts ? facts.node : 'this node'}` : `Nothing is wrong on ${facts ? facts.node : ''}`;
    put($('verdict-text'), !facts ? 'Connecting to the proxy' : wrong.length || known.findings ? words : `Looking at ${facts.node}`);
    const looked = known.findings ? `doctor looked at ${clock(known.findingsAt)}, ${ago(known.findingsAt)}` : 'doctor is looking';
    const look = list.filter((one) => one.level === 'look').length;
    put($('verdict-sub'), facts ? [look && `${plural(look, 'thing')} to look at`, kernelSentence(), looked + (known.looking && known.findings ? ', looking again' : '')].filter(Boolean).join(' · ') : '');
  },

  vitals() {
    const share = fullness(), rows = [...known.rows.values()];
    const none = rows.filter(noEndpoints).length, level = share >= .95 ? 'bad' : share >= .8 ? 'warn' : '';
    const tiles = [
      ['#/services', 'Services', count(known.rows.size), known.queued ? `${count(known.queued)} on their way` : known.rowsLoaded ? 'all committed' : 'loading'],
      ['#/services?f=none', 'Without endpoints', count(none), none ? 'for all or some ports' : 'every port has an endpoint', none ? 'look' : ''],
      ['#/now', 'Changes', rate(known.perSecond), known.lastChange ? ago(known.lastChange) : 'none seen yet'],
      ['#/now', 'API to kernel, p99', known.lag ? delay(known.lag.p99) : '–', known.lag ? `p50 ${delay(known.lag.p50)}` : 'none since the page opened'],
      ['#/services?s=rate', 'New connections', known.flowsAt && !known.flowsError ? rate(known.newPerSecond) : '–', newSentence()],
      ['#/now', 'Connection tracking', share === null ? '–' : percent(share), known.conntrack ? `${brief(known.conntrack.count)} of ${brief(known.conntrack.max)}` : 'not known', level, share],
    ];
    const made = $('vitals').children;
    tiles.forEach((tile, place) => vital(made[place] || $('vitals').appendChild(vitalShell()), ...tile));
  },

  keys(key) {
    const cards = [...$('problems').children];
    if (key === 'l') { this.look(); return true; }
    if (key !== 'down' && key !== 'up') return false;
    const at = cards.indexOf(document.activeElement.closest('.problem'));
    const next = cards[Math.max(0, Math.min(cards.length - 1, at + (key === 'down' ? 1 : -1)))];
    if (next) next.focus();
    return true;
  },
};

function newSentence() {
  if (known.flowsError || !known.flowsAt) return known.flowsError ? 'not known' : '';
  const used = [...known.flows.values()].filter((one) => one.rate).length;
  const part = known.sampled < 1 ? `, from 1 in ${Math.round(1 / known.sampled)}` : '';
  return used ? `to ${plural(used, 'Service')}${part}` : 'to no Service now';
}

function kernelSentence() {
  if (!known.families.length) return '';
  const unsound = known.families.filter((one) => !one.sound_since);
  if (unsound.length) return `${unsound.map((one) => one.family).join(' and ')}: not known to be as planned`;
  const since = Math.max(...known.families.map((one) => one.sound_since));
  return `kernel as planned (${known.families.map((one) => one.family).join(' and ')}) for ${duration(theirs() - since)}`;
}

function vitalShell() {
  const value = el('span', { class: 'val' }, '', el('small'));
  return el('li', {}, el('a', {}, el('span', { class: 'cap' }), value), el('div', { class: 'meter', 'aria-hidden': 'true', hidden: true }, el('i')));
}

function vital(node, href, name, value, small, level = '', share = null) {
  const [tile, meter] = node.children, [cap, val] = tile.children;
  node.className = level;
  if (tile.getAttribute('href') !== href) tile.setAttribute('href', href);
  put(cap, name);
  if (val.firstChild.data !== value) val.firstChild.data = value;
  put(val.lastChild, small || '');
  meter.hidden = share === null;
  meter.className = `meter ${level}`;
  meter.firstChild.style.width = `${Math.min(100, (share || 0) * 100)}%`;
}

function problemCard(one) {
  const card = el('li', { class: `problem ${one.level}`, tabindex: '-1' },
    el('span', { class: 'tag' }, TAGS[one.level]), el('h3', {}, capital(one.what)));
  if (one.detail) card.append(el('p', {}, capital(one.detail)));
  if (one.services) {
    const names = one.services.slice(0, 12).map((name) => link(name));
    if (one.services.length > 12) names.push(el('a', { href: one.more }, `all ${count(one.services.length)}`));
    card.append(el('div', { class: 'names' }, ...names));
  }
  if (one.fix) card.append(fixLine(one.fix));
  return card;
}

/** Matches the commands of a fix that can be run unchanged. Other commands are examples of the cause, and get no button. */
const COMMANDS = /`((?:kube-proxy|kubectl) [^`]+)`|((?:modprobe \w+; )?sysctl -w [\w./-]+=\w+)/g;

function fixLine(text) {
  const line = el('span'), commands = [...text.matchAll(COMMANDS)];
  let from = 0;
  for (const found of commands) {
    const command = found[1] || found[2];
    line.append(text.slice(from, found.index), el('code', {}, command));
    // If there are several commands, each command is followed by its own button.
    if (commands.length > 1) line.append(' ', copyButton(command));
    from = found.index + found[0].length;
  }
  line.append(text.slice(from));
  const one = commands[0];
  return el('div', { class: 'fix' }, el('b', {}, 'Fix'), line, commands.length > 1 ? null : copyButton(one ? one[1] || one[2] : text));
}

function copyButton(text) {
  const button = el('button', { class: 'button', type: 'button', title: `Copy: ${text}`, click: async () => {
    // Only pages of localhost or with TLS may write to the clipboard; on other pages the user marks the text.
    try { await navigator.clipboard.writeText(text); put(button, 'Copied'); } catch { put(button, 'Mark it'); }
    setTimeout(() => put(button, 'Copy'), 1500);
  } }, 'Copy');
  return button;
}

/** A sentence begins with a capital, unless it begins with a name (net.ipv4.ip_forward, shop/web). */
const capital = (text) => (/^[a-z]+[ ,:]/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text);
