"""An API server that behaves like Kubernetes' where a client can tell, and fails on demand.

`storage` keeps objects, revisions and history without any I/O; `server` speaks HTTP, with the documents of `discovery` and
the watches of `streams`; `resources` are the kinds that are known from the start. It keeps what it is given: no defaults,
no admission, no controllers.
"""
