"""The proxy modes, one folder per mode. A backend only translates plans into kernel objects; `model` defines the
meaning of Services."""
