module btrfsublk/kubernetes

go 1.26.6

require (
	k8s.io/kubernetes v1.37.2
	sigs.k8s.io/cri-tools v1.37.0
)
