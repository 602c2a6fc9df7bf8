// ---- The picture: client -> frontend -> action -> endpoints -----------------------------------------------------------------

const fit = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);
const words = (x, y, text, name = '', anchor = 'start') => shape('text', { x, y, class: name, 'text-anchor': anchor }, text);
/** Return a text of at most `most` characters; the pointer on a shortened text shows the whole text. */
function cut(x, y, text, most, name) {
  const made = words(x, y, fit(text, most), name);
  if (text.length > most) made.append(shape('title', {}, text));
  return made;
}
const curve = (x1, y1, x2, y2) => `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;

/** Return the positions of the picture's columns and their boxes; a vertical position is the middle of a box. */
function wayLayout(port, targets, width) {
  // Actions for local endpoints are first, actions without endpoints are last. Local endpoints are at the top, too, so few lines cross.
  const order = (action) => ['local', 'all', ''].indexOf((TREATMENTS[action] || ['', '', 'all'])[2]);
  const actions = [...new Set(port.frontends.flatMap((one) => ORIGINS.map(([, key]) => one[key])))].sort((a, b) => order(a) - order(b));
  const shown = targets.slice(0, MOST), rows = Math.max(1, shown.length + (targets.length > MOST ? 1 : 0));
  const tall = { ends: rows * 40, fronts: port.frontends.length * 62, acts: actions.length * 66, from: 3 * 56 };
  const high = Math.max(...Object.values(tall)) + 34;
  const middles = (total, n, each) => Array.from({ length: n }, (_, place) => 30 + (high - 34 - total) / 2 + each * (place + .5));
  // The width that the boxes do not need becomes space between the columns, so that the lines can be followed.
  const gap = Math.max(56, Math.min(130, (width - 100 - 200 - 190 - 330) / 3.4));
  const x = { from: 2, front: 102 + gap, act: 102 + 200 + 2 * gap, hub: 102 + 200 + 190 + 2.4 * gap };
  return {
    actions, shown, high, width, x: { ...x, end: x.hub + gap }, front: middles(tall.fronts, port.frontends.length, 62),
    act: middles(tall.acts, actions.length, 66), from: middles(tall.from, 3, 56), end: middles(tall.ends, rows, 40),
  };
}

function wayPicture(port, targets, width, holder) {
  const at = wayLayout(port, targets, width), lines = shape('g'), boxes = shape('g');
  const svg = shape('svg', { width, height: at.high, viewBox: `0 0 ${width} ${at.high}`, 'aria-hidden': 'true' }, lines, boxes);
  [['Client', at.x.from], ['Frontend', at.x.front], ['Action', at.x.act], ['Endpoint', at.x.end]].forEach(([text, x]) => boxes.append(words(x, 13, text, 'h')));
  if (targets.length) boxes.append(words(width - 4, 13, 'last minute | planned', 'h', 'end'));
  const hubs = drawHubs(port, at, lines, boxes);
  drawOrigins(port, at, lines, boxes, holder);
  drawFrontends(port, at, lines, boxes);
  drawActions(port, at, lines, boxes, hubs);
  at.shown.forEach((one, place) => drawEndpoint(one, at.end[place], at, boxes));
  if (targets.length > MOST) boxes.append(words(at.x.end, at.end[MOST] + 4, `and ${count(targets.length - MOST)} more, in the table below`, 's'));
  if (!targets.length) boxes.append(words(at.x.end, at.end[0] + 4, 'no endpoint', 'bad b'));
  return svg;
}

function drawOrigins(port, at, lines, boxes, holder) {
  ORIGINS.forEach(([id, , label], place) => {
    const y = at.from[place];
    const box = shape('g', { class: 'from' }, shape('rect', { x: at.x.from, y: y - 17, width: 98, height: 34, rx: 17, class: id }), words(at.x.from + 49, y + 4.5, label, 'b', 'middle'));
    box.addEventListener('pointerenter', () => { holder.dataset.only = id; });
    box.addEventListener('pointerleave', () => { delete holder.dataset.only; });
    boxes.append(box);
    at.front.forEach((there) => lines.append(shape('path', { class: `way ${id}`, d: curve(at.x.from + 98, y, at.x.front, there + (place - 1) * 9) })));
  });
}

function drawFrontends(port, at, lines, boxes) {
  port.frontends.forEach((one, place) => {
    const y = at.front[place], x = at.x.front;
    const guard = one.sources ? `only from ${one.sources.join(', ') || 'nowhere'}` : '';
    boxes.append(shape('rect', { x, y: y - 24, width: 200, height: 48, rx: 8, class: 'box' }), cut(x + 12, y - (guard ? 7 : 3), one.address, 24, 'm b'),
      cut(x + 12, y + (guard ? 7 : 14), `${KINDS[one.kind] || one.kind}${port.name ? `, port ${port.name}` : ''}`, 34, 's'));
    if (guard) boxes.append(cut(x + 12, y + 19, guard, 32, 's warn'));
    ORIGINS.forEach(([id, key], order) => {
      const there = at.act[at.actions.indexOf(one[key])];
      lines.append(shape('path', { class: `way ${id}`, d: curve(x + 200, y + (order - 1) * 9, at.x.act, there + (order - 1) * 9) }));
    });
  });
}

function drawActions(port, at, lines, boxes, hubs) {
  at.actions.forEach((action, place) => {
    const [title, sub, pool] = TREATMENTS[action] || [action, '', 'all'], y = at.act[place], x = at.x.act, ends = !pool;
    const sticky = port.affinitySeconds && pool ? `same endpoint for ${duration(port.affinitySeconds)}` : '';
    boxes.append(shape('rect', { x, y: y - 27, width: 190, height: 54, rx: 8, class: `box ${ends ? 'bad' : ''}` }), words(x + 12, y - (sticky ? 9 : 4), title, ends ? 'b bad' : 'b'),
      words(x + 12, y + (sticky ? 6 : 13), sub, 's'));
    if (sticky) boxes.append(words(x + 12, y + 20, sticky, 's'));
    const hub = hubs[pool];
    if (!hub) return;
    const users = ORIGINS.filter(([, key]) => port.frontends.some((one) => one[key] === action));
    users.forEach(([id], order) => lines.append(shape('path', { class: `way ${id}`, d: curve(x + 190, y + (order - (users.length - 1) / 2) * 9, at.x.hub, hub.y) })));
  });
}

/** Draw each pool (all endpoints, or the endpoints on this node) as a point with lines to its endpoints. */
function drawHubs(port, at, lines, boxes) {
  const pools = { all: new Set(port.endpoints), local: new Set(port.localEndpoints) }, hubs = {};
  const used = new Set(at.actions.map((action) => (TREATMENTS[action] || [])[2]));
  for (const name of ['all', 'local']) {
    const rows = at.shown.flatMap((one, place) => (used.has(name) && pools[name].has(one.address) ? [[one, at.end[place]]] : []));
    if (!rows.length) continue;
    const y = rows.reduce((sum, [, each]) => sum + each, 0) / rows.length - (used.has('all') && used.has('local') && name === 'local' ? 16 : 0);
    hubs[name] = { y };
    rows.forEach(([one, there]) => lines.append(shape('path', { class: 'fan', d: curve(at.x.hub, y, at.x.end - 6, there), 'data-end': one.address, 'data-as': 'fan' })));
    boxes.append(shape('circle', { cx: at.x.hub, cy: y, r: 5, class: 'hub' }), words(at.x.hub, y - 12, name === 'all' ? `${pools.all.size}` : `${pools.local.size} local`, 's b', 'middle'));
  }
  return hubs;
}

function drawEndpoint(one, y, at, boxes) {
  const x = at.x.end, right = at.width - 4, dot = one.in ? (one.terminating ? 'd-end' : 'd-in') : 'd-out';
  const second = one.in ? [whereOf(one), one.terminating ? 'terminating' : ''].filter(Boolean).join(' · ') : `out: ${one.why || 'left out'}`;
  const room = Math.floor((right - x - 150) / 7.4);
  boxes.append(shape('circle', { cx: x + 4, cy: y - 5, r: 4.5, class: dot }), cut(x + 16, y - 1, one.address, room, `m ${one.in ? '' : 'out'}`), cut(x + 16, y + 13, second, one.in ? room + 4 : 52, one.in ? 's' : 's warn'));
  if (!one.in) return;
  boxes.append(shape('rect', { x: right - TRACK, y: y - 11, width: TRACK, height: 6, rx: 3, class: 'track' }), shape('rect', { x: right - TRACK, y: y - 11, width: 0, height: 6, rx: 3, class: 'share', 'data-end': one.address, 'data-as': 'bar' }));
  // The planned end of the endpoint's bar, by weight, or with equal shares.
  if (one.want !== undefined) boxes.append(shape('rect', { x: right, y: y - 14, width: 2, height: 12, class: 'want', 'data-end': one.address, 'data-as': 'want', 'data-want': one.want, 'data-left': right - TRACK }, shape('title', {}, `planned: ${percent(one.want)}`)));
  const share = words(right, y + 11, '', 's', 'end');
  Object.entries({ end: one.address, as: 'long', idle: 'yes' }).forEach(([key, value]) => { share.dataset[key] = value; });
  boxes.append(share);
}
