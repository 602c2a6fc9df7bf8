// ---- Services: a list with elements only for visible rows -----------------------------------------------------------------

const FILTERS = [
  ['none', 'No endpoints', (row) => noEndpoints(row)],
  ['local', 'Local only', (row) => /[Ll]/.test(row.flags)],
  ['recent', 'Changed in 5 min', (row) => theirs() - row.changedAt < RECENT],
  ['busy', 'In use now', (row) => (known.flows.get(row.name) || {}).rate > 0],
  ['trouble', 'Not as planned', (row) => !['programmed', 'ignored'].includes(row.state)],
];
const SORTS = {
  name: null,
  rate: (a, b) => rateOf(b) - rateOf(a),
  ready: (a, b) => a.used - b.used,
  changed: (a, b) => b.changedAt - a.changedAt,
};
const SORTED = [['name', 'name'], ['rate', 'new connections'], ['ready', 'fewest ready'], ['changed', 'last change']];
/** The address in a search for an address, with or without a port; '' for any other search. */
const addressIn = (text) => (/^(\d{1,3}(?:\.\d{1,3}){3})(?::\d+)?$/.exec(text) || /^\[([0-9a-f:]+)\](?::\d+)?$/i.exec(text) || /^([0-9a-f]*:[0-9a-f:]*:[0-9a-f:.]*)$/i.exec(text) || ['', ''])[1];
const rateOf = (row) => (known.flows.get(row.name) || { rate: 0 }).rate;

const servicesView = {
  section: 'services-view', label: 'Services', href: '#/services', query: '', filters: new Set(), sort: 'name',
  held: { address: '', names: new Set() }, asking: 0, shown: [], key: '', at: -1, atName: '', pool: [], first: -1, height: 38,

  build() {
    const buttons = FILTERS.map(([id, label]) => el('button', { class: 'button', type: 'button', 'data-filter': id, 'aria-pressed': 'false', click: () => this.toggle(id) }, label));
    $('filters').append(...buttons);
    $('sort').append(...SORTED.map(([value, text]) => el('option', { value }, text)));
    $('sort').addEventListener('change', () => { this.sort = $('sort').value; this.place(); this.refresh(true); });
    const head = [['', ''], ['name', 'Service'], ['', 'Type'], ['', 'Addresses'], ['ready', 'Endpoints'], ['rate', 'New connections'], ['', 'Balance, last minute']];
    head.forEach(([sort, text], place) => {
      const shown = sort ? el('button', { type: 'button', tabindex: '-1', 'data-sort': sort, click: () => this.sortBy(sort) }, text) : text || el('span', { class: 'vh' }, 'State');
      $('thead').append(el('span', { role: 'columnheader', 'aria-colindex': place + 1 }, shown));
    });
    $('search').addEventListener('input', () => { this.query = $('search').value; this.place(); this.refresh(true); this.askHolders(); });
    $('search').addEventListener('keydown', (event) => {
      if (event.key === 'ArrowDown' || event.key === 'Enter') { event.preventDefault(); this.choose(Math.max(0, this.at)); $('grid').focus(); }
    });
    $('grid').addEventListener('scroll', () => this.paint(), { passive: true });
    $('spacer').addEventListener('click', (event) => {
      const row = event.target.closest('.row');
      if (row && !String(getSelection())) this.open(this.shown[row.index]);
    });
    new ResizeObserver(() => this.measure()).observe($('grid'));
  },

  enter(_, params) {
    this.href = location.hash;
    this.query = params.get('q') || '';
    this.filters = new Set((params.get('f') || '').split(',').filter(Boolean));
    this.sort = params.get('s') in SORTS ? params.get('s') : 'name';
    $('search').value = this.query;
    this.measure();
    this.refresh(true, true);
    this.held.address = '';
    this.askHolders();
  },

  /** Ask the proxy for the Services with the searched address, because the list has no addresses of endpoints. */
  askHolders() {
    const address = addressIn(this.query.trim());
    clearTimeout(this.asking);
    if (!address || address === this.held.address) return;
    this.asking = setTimeout(async () => {
      try {
        const { services } = await getJson(`api/find?address=${encodeURIComponent(address)}`);
        if (address === addressIn(this.query.trim())) { this.held = { address, names: new Set(services) }; this.refresh(true); }
      } catch { /* the address is still incomplete */ }
    }, 200);
  },

  /** Write the search into the page's URL, so that users can send the URL to others. */
  place() {
    const params = new URLSearchParams();
    if (this.query) params.set('q', this.query);
    if (this.filters.size) params.set('f', [...this.filters].join(','));
    if (this.sort !== 'name') params.set('s', this.sort);
    const text = params.toString();
    this.href = `#/services${text ? `?${text}` : ''}`;
    history.replaceState(null, '', this.href);
  },

  toggle(id) {
    if (!this.filters.delete(id)) this.filters.add(id);
    this.place();
    this.refresh(true);
  },

  sortBy(sort) {
    this.sort = this.sort === sort && sort !== 'name' ? 'name' : sort;
    this.place();
    this.refresh(true);
  },

  draw(what) {
    // A list in the order of traffic is sorted again only while neither the pointer nor the keyboard focus is in the list.
    const settled = this.sort === 'name' || !($('grid').matches(':hover') || $('grid').contains(document.activeElement));
    if (what.has('flows') && this.filters.has('busy')) this.refresh(settled);
    else if (what.has('flows') && this.sort === 'rate') { if (settled) this.refresh(true); else this.paint(true); }
    else if (what.has('rows') || (what.has('second') && this.filters.has('recent'))) this.refresh(this.sort === 'name' || settled);
    else this.paint(true);
  },

  /** Find the rows to show. Without `sorting` the rows keep their order; `entering` restores the scroll position of the same search. */
  refresh(sorting, entering = false) {
    const terms = this.query.toLowerCase().split(/\s+/).filter(Boolean);
    const tests = FILTERS.filter(([id]) => this.filters.has(id)).map(([, , test]) => test);
    const address = addressIn(this.query.trim()), held = address && address === this.held.address ? this.held.names : new Set();
    const fits = (row) => (held.has(row.name) || terms.every((term) => row.hay.includes(term))) && tests.every((test) => test(row));
    const before = new Map(sorting ? [] : this.shown.map((row, place) => [row, place]));
    this.shown = terms.length || tests.length ? known.sorted.filter(fits) : known.sorted.slice();
    if (!sorting && this.sort !== 'name') this.shown.sort((a, b) => (before.get(a) ?? 1e9) - (before.get(b) ?? 1e9));
    else if (SORTS[this.sort]) this.shown.sort(SORTS[this.sort]);
    const key = `${terms.join(' ')} ${[...this.filters].join()} ${this.sort}`;
    if (key !== this.key || entering) $('grid').scrollTop = entering && key === this.key ? this.kept || 0 : 0;
    if (key !== this.key) { this.atName = ''; }
    this.key = key;
    this.at = this.atName ? this.shown.findIndex((row) => row.name === this.atName) : -1;
    this.head();
    this.paint(true);
  },

  head() {
    if ($('sort').value !== this.sort) $('sort').value = this.sort;
    for (const button of $('filters').children) button.setAttribute('aria-pressed', String(this.filters.has(button.dataset.filter)));
    for (const button of $('thead').querySelectorAll('button')) {
      const on = button.dataset.sort === this.sort;
      button.setAttribute('aria-pressed', String(on));
      button.parentNode.setAttribute('aria-sort', on ? (this.sort === 'rate' || this.sort === 'changed' ? 'descending' : 'ascending') : 'none');
    }
    const all = known.rows.size, some = this.shown.length;
    put($('sum'), some === all ? plural(all, 'Service') : `${count(some)} of ${plural(all, 'Service')}`);
    $('grid').setAttribute('aria-rowcount', String(some + 1));
    $('none').hidden = some > 0;
    const why = known.rowsError ? `The list could not be loaded: ${known.rowsError}.` : !known.rowsLoaded ? 'Loading Services' : !all ? 'No Service is known to this proxy yet.' : 'No Service fits. Esc clears the search and the filters.';
    if (!some) put($('none').firstChild, why);
  },

  measure() {
    const height = parseFloat(getComputedStyle(document.documentElement).getPropertyValue('--row'));
    if (height !== this.height) this.height = height;
    this.paint(true);
  },

  /** Fill the visible rows, and a few rows above and below. Elements are used again for other rows, so their number is limited. */
  paint(all = false) {
    const box = $('grid'), top = box.scrollTop, high = box.clientHeight;
    if (!high) return;
    this.kept = top;
    const total = `${this.shown.length * this.height}px`;
    if ($('spacer').style.height !== total) $('spacer').style.height = total;
    const first = Math.max(0, Math.floor(top / this.height) - 6);
    const last = Math.min(this.shown.length, Math.ceil((top + high) / this.height) + 6);
    if (!all && first === this.first) return;
    this.first = first;
    const size = Math.max(this.pool.length, Math.ceil(high / this.height) + 13);
    while (this.pool.length < size) this.pool.push($('spacer').appendChild(makeRowElement(this.pool.length)));
    for (let index = first; index < first + size; index += 1) {
      // The remainder assigns a row to the same element while the list scrolls.
      const node = this.pool[index % size];
      node.hidden = index >= last;
      if (!node.hidden) paintRow(node, this.shown[index], index, this.height, index === this.at);
    }
    if (this.at >= first && this.at < last) $('grid').setAttribute('aria-activedescendant', this.pool[this.at % size].id);
    else $('grid').removeAttribute('aria-activedescendant');
  },

  choose(index) {
    if (!this.shown.length) return;
    this.at = Math.max(0, Math.min(this.shown.length - 1, index));
    this.atName = this.shown[this.at].name;
    const box = $('grid'), top = this.at * this.height, head = $('thead').offsetHeight;  // the header stays at the top
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + this.height + head > box.scrollTop + box.clientHeight) box.scrollTop = top + this.height + head - box.clientHeight;
    this.paint(true);
  },

  open(row) {
    if (row) { this.atName = row.name; location.hash = serviceHref(row.name); }
  },

  keys(key) {
    const page = Math.max(1, Math.floor($('grid').clientHeight / this.height) - 1);
    const steps = { down: 1, up: -1, pagedown: page, pageup: -page, home: -1e9, end: 1e9 };
    if (key in steps) { if (document.activeElement !== $('grid')) $('grid').focus({ preventScroll: true }); this.choose(this.at + steps[key]); return true; }
    if (key === 's') { $('sort').focus(); return true; }
    if (key === 'enter' && this.at >= 0) { this.open(this.shown[this.at]); return true; }
    if (key === 'escape' && (this.query || this.filters.size)) {
      this.query = $('search').value = '';
      this.filters.clear();
      this.place();
      this.refresh(true);
      return true;
    }
    return false;
  },
};

function makeRowElement(place) {
  const cell = (name, ...children) => el('div', { role: 'gridcell', class: name }, ...children);
  const spark = shape('svg', { viewBox: '0 0 84 22', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, shape('path', { class: 'spark-fill' }), shape('path', { class: 'spark' }));
  const bar = shape('svg', { viewBox: '0 0 70 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' }, shape('path'), shape('path'));
  const node = el('div', { role: 'row', class: 'row cols', id: `row-${place}` },
    cell('', el('i', { class: 'dot' })), cell('name', el('span', { class: 'dim' }), el('b')), cell('type'), cell('mono'),
    cell('ends', el('div', { class: 'meter', 'aria-hidden': 'true' }, el('i')), el('span')), cell('rate', el('span'), spark), cell('balance', bar, el('span')));
  node.has = {};
  return node;
}

/** Store the new value of a part of a row; return whether it differs from the shown value. */
function differs(node, part, value) {
  if (node.has[part] === value) return false;
  node.has[part] = value;
  return true;
}

function paintRow(node, row, index, height, selected) {
  const [state, name, type, addresses, ends, speed, balance] = node.children;
  node.index = index;
  if (differs(node, 'top', index * height)) {
    node.style.transform = `translateY(${index * height}px)`;
    node.setAttribute('aria-rowindex', String(index + 2));
  }
  if (differs(node, 'selected', selected)) node.setAttribute('aria-selected', String(selected));
  if (differs(node, 'name', row.name)) {
    put(name.firstChild, `${row.namespace}/`);
    put(name.lastChild, row.short);
    name.title = row.name;
  }
  if (differs(node, 'state', `${row.state} ${lacking(row)}`)) {
    const without = lacking(row) && `, ${lacking(row)}`;
    state.firstChild.className = dotOf(row.state, row);
    state.title = (STATES[row.state] || row.state) + without;
    state.setAttribute('aria-label', row.state + without);
  }
  if (differs(node, 'type', `${row.type} ${row.flags}`)) {
    type.replaceChildren(SHORT[row.type] || row.type, ...badges(row.flags, 2));
    type.title = [row.type, ...[...row.flags].map((flag) => (FLAGS[flag] || [flag, flag])[1])].join(', ');
  }
  if (differs(node, 'addresses', row.addresses.join(' '))) {
    put(addresses, row.addresses.join('  '));
    addresses.title = row.addresses.join('\n');
  }
  if (differs(node, 'ends', `${row.ready}/${row.total} ${row.state} ${row.flags} ${row.unserved}`)) {
    ends.className = `ends ${lacking(row) && noneReady(row) ? 'none' : lacking(row) || row.used < row.total ? 'some' : ''}`;
    ends.firstChild.firstChild.style.width = `${row.total ? row.used / row.total * 100 : 0}%`;
    put(ends.lastChild, `${count(row.used)} of ${count(row.total)}`);
    ends.title = endsText(row);
    ends.setAttribute('aria-label', ends.title);
  }
  paintFlow(node, known.flows.get(row.name), speed, balance);
}

const SHORT = { ClusterIP: 'ClusterIP', NodePort: 'NodePort', LoadBalancer: 'LB', ExternalName: 'ExtName' };
const badges = (flags, most = 9) => [...flags].slice(0, most).map((flag) => el('span', { class: 'badge', title: (FLAGS[flag] || ['', flag])[1] }, (FLAGS[flag] || [flag])[0].replace('ext ', '').replace('int ', '')));

/** Return the port and family with the most new connections, and its new connections by endpoint. */
function busiestPort(flow) {
  const ports = new Map();
  for (const [key, weight] of flow ? flow.ends : []) {
    const space = key.lastIndexOf(' '), ends = ports.get(key.slice(0, space)) || [];
    ports.set(key.slice(0, space), [...ends, [key.slice(space + 1), weight]]);
  }
  const sum = ([, ends]) => ends.reduce((so, [, weight]) => so + weight, 0);
  return [...ports].sort((a, b) => sum(b) - sum(a))[0] || ['', []];
}

function paintFlow(node, flow, speed, balance) {
  if (!differs(node, 'flow', flow ? flow.spark.join() : '')) return;
  put(speed.firstChild, flow ? rate(flow.rate) : '');
  const [fill, line] = sparkPaths(flow ? flow.spark : null, 84, 22);
  speed.lastChild.firstChild.setAttribute('d', fill);
  speed.lastChild.lastChild.setAttribute('d', line);
  const [port, found] = busiestPort(flow), ends = found.sort((a, b) => (a[0] < b[0] ? -1 : 1)).map((one) => one[1]);
  const [odd, even] = balancePaths(ends, 70, 10), total = ends.reduce((a, b) => a + b, 0);
  balance.firstChild.firstChild.setAttribute('d', odd);
  balance.firstChild.lastChild.setAttribute('d', even);
  balance.firstChild.classList.toggle('vh', !ends.length);
  put(balance.lastChild, total ? `max ${percent(Math.max(...ends) / total)}` : '');
  balance.title = total ? `new connections of about the last minute to ${port}, over ${plural(ends.length, 'endpoint')}; the busiest one got ${percent(Math.max(...ends) / total)}` : '';
}

function sparkPaths(values, width, height) {
  if (!values) return ['', ''];
  const most = Math.max(...values, 1e-9), step = width / (values.length - 1);
  const points = values.map((value, place) => `${(place * step).toFixed(1)} ${(height - 1.5 - value / most * (height - 3.5)).toFixed(1)}`);
  const line = `M${points.join('L')}`;
  return [`${line}L${width} ${height}L0 ${height}Z`, line];
}

/** Return two paths with every second bar each, so that neighbouring bars can have different colours. */
function balancePaths(ends, width, height) {
  const total = ends.reduce((a, b) => a + b, 0), paths = ['', ''];
  let x = 0;
  ends.forEach((weight, place) => {
    const wide = total ? weight / total * width : 0, gap = ends.length < 18 ? .8 : 0;
    if (wide > gap) paths[place % 2] += `M${x.toFixed(2)} 0h${(wide - gap).toFixed(2)}v${height}h${(gap - wide).toFixed(2)}z`;
    x += wide;
  });
  return paths;
}
