"""What Serve's controller, which has no configuration, is told where it starts."""

from __future__ import annotations

from lexshard.cluster.process_tree import die_with_parent


def prepare() -> None:
    """Serve calls this in the controller's process, before it is made."""
    die_with_parent()
    leave_reserve_proxy_out()


def leave_reserve_proxy_out() -> None:
    """Behind HAProxy Serve keeps a proxy of its own in reserve, for applications without a replica:
    140 MB that `cluster.ingress` sends no request to."""
    from ray.serve._private.proxy_state import ProxyStateManager

    def start_none(manager: ProxyStateManager, *node: str) -> None:
        pass

    ProxyStateManager._start_fallback_proxy_if_needed = start_none
