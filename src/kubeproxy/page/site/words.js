// ---- Words, units, elements ---------------------------------------------------------------------------------------

const NARROW = matchMedia('(max-width: 860px)');   // as in style.css, which then shows text in place of the picture
const RECENT = 300;           // seconds in which a Service counts as recently changed
const SPAN = 900;             // seconds that the charts show
const SPARK = 60;             // seconds that a sparkline shows
const SVG = 'http://www.w3.org/2000/svg';
const ORIGINS = [['pod', 'fromPods', 'pods'], ['node', 'fromNode', 'this node'], ['outside', 'fromOutside', 'outside']];
const STATES = {
  programmed: 'programmed: the kernel has it', pending: 'pending: on its way into the kernel',
  refused: 'refused: the kernel does not take it', differs: 'differs: another program changed what the kernel has',
  ignored: 'ignored: it needs no rules in the kernel', deleting: 'deleting: on its way out of the kernel',
};
const FLAGS = {
  L: ['ext local', 'externalTrafficPolicy: Local'], l: ['int local', 'internalTrafficPolicy: Local'],
  A: ['affinity', 'sessionAffinity: ClientIP'], H: ['hints', 'topology hints are in force'],
  E: ['ejected', 'failing endpoints get no new connections from this node'],
  P: ['no such port', 'no endpoint has a port of this Service: does a container have the named targetPort?'],
  N: ['none here', 'internalTrafficPolicy: Local, and no available endpoint is on this node'],
  T: ['terminating', 'no endpoint is ready: terminating endpoints serve'],
};

const $ = (id) => document.getElementById(id);
const now = () => Date.now() / 1000;
/** The time of the proxy's clock; behind a port-forward, the proxy runs on another machine. */
const theirs = () => now() + known.skew;
const ago = (at) => (theirs() - at < 1.5 ? 'just now' : `${duration(theirs() - at)} ago`);
const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
const number = new Intl.NumberFormat('en-US');
const count = (n) => number.format(n);
const brief = (n) => (n >= 10000 ? `${count(Math.round(n / 1000))}k` : count(n));

function decimals(value) {
  if (value >= 100) return count(Math.round(value));
  return value.toFixed(value >= 10 ? 0 : value >= 1 ? 1 : 2);
}

/** A rate; with ≈ if it is an estimate from one connection in several. */
function rate(perSecond) {
  if (!perSecond) return '0/s';
  const sign = known.sampled < 1 ? '≈ ' : '';
  return sign + (perSecond >= 10000 ? `${decimals(perSecond / 1000)}k/s` : `${decimals(perSecond)}/s`);
}

/** Return the text of a delay in milliseconds or seconds, from milliseconds. */
function delay(ms) {
  if (ms === null || ms === undefined) return '–';
  return ms >= 1000 ? `${decimals(ms / 1000)} s` : `${decimals(ms)} ms`;
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 120) return `${s} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  return s < 172800 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} days`;
}

const percent = (share) => `${share > 0 && share < .01 ? '<1' : Math.round(share * 100)} %`;
const two = (n) => String(n).padStart(2, '0');

function clock(at, withMilliseconds = false) {
  const d = new Date(at * 1000);
  const time = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return withMilliseconds ? `${time}.${String(d.getMilliseconds()).padStart(3, '0')}` : time;
}

/** An element with attributes and children. Texts become text nodes, so a text from the cluster is never markup. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') made.addEventListener(name, value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Write a text only if it differs from the present text, because every write costs a layout. */
function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function link(service, ...children) {
  return el('a', { href: serviceHref(service) }, ...(children.length ? children : [service]));
}

const serviceHref = (name) => `#/service/${name.split('/').map(encodeURIComponent).join('/')}`;

/** Announce a text to users of screen readers. */
function say(text) {
  put($('say'), text);
}
