"""One folder per proxy mode. A backend only translates plans; the semantics of Services are in model."""
