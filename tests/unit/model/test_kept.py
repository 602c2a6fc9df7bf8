"""The objects that the planner stores from a list keep their meaning, and share equal parts."""

from hypothesis import given
from msgspec.json import decode

from kubeproxy.model.endpoints import PackedSlice
from kubeproxy.model.events import Replaced, kept
from kubeproxy.model.objects import Service
from kubeproxy.model.plan import Globals
from kubeproxy.model.planner import Planner
from support.cluster_strategies import services, slices


@given(services(), slices())
def test_a_list_of_stored_objects_means_the_same_as_the_original(service, piece):
    found = []
    for keep in (lambda one: one, kept):
        planner = Planner(Globals("n"))
        rejected = planner.apply([Replaced("services", [keep(service)]), Replaced("endpointslices", [keep(piece)])])
        planner.take()
        found.append((rejected, planner.services, planner.slices, planner.compiled))
    assert found[0] == found[1]


@given(services())
def test_a_service_stays_equal(service):
    assert kept(service) == service


def test_equal_parts_of_services_are_stored_once():
    def made(number):
        found = (
            b'{"metadata":{"name":"web","namespace":"default"},"spec":{"type":"ClusterIP","clusterIP":"10.96.0.%d",'
            b'"clusterIPs":["10.96.0.%d"],"ports":[{"port":80,"name":"web"}]}}' % (number, number)
        )
        return kept(decode(found, type=Service))

    one, other = made(1), made(2)
    assert one.metadata.namespace is other.metadata.namespace
    assert one.spec.type is other.spec.type
    assert one.spec.ports is other.spec.ports
    assert one.spec.cluster_ips[0] is one.spec.cluster_ip


@given(slices())
def test_a_slice_is_packed(piece):
    found = kept(piece)
    assert isinstance(found, PackedSlice)
    assert found.metadata == piece.metadata
