#!/usr/bin/env bash
# Build the programs of a Kubernetes cluster for tests from Go modules; versions are pinned by go.mod and go.sum.
# usage: build.sh [control] [node] [go]
#   control  etcd and Kubernetes; 10 minutes on two cores
#   node     what a real node needs besides: containerd, network plugins, cluster DNS; 7 minutes more
#   go       nothing: only name the Go that would be used
# They go to $K8S_CACHE/bin (by default ~/.cache/k8s-node/bin). What is there is skipped; FORCE=1 builds it again.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bin=${K8S_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/k8s-node}/bin

export CGO_ENABLED=0 GOFLAGS="-trimpath -mod=readonly -buildvcs=false"
export GOTOOLCHAIN=auto # from Go 1.21 on it fetches the newer one that a go.mod asks for

# The first Go that will do.
find_go() {
  local each
  for each in "$here/../../.cache/go/bin/go" "$(command -v go)" /usr/local/go/bin/go; do
    if [[ $("$each" env GOVERSION 2>/dev/null) =~ ^go1\.([0-9]+) ]] && ((BASH_REMATCH[1] >= 21)); then
      echo "$each"
      return
    fi
  done
  echo "Go 1.21 or newer is needed (https://go.dev/dl; Debian 13: apt-get install golang-go)" >&2
  exit 3
}

# build MODULE PROGRAM PACKAGE [go build flags ...]
build() {
  local go module=$1 program=$2 package=$3
  shift 3
  [[ ! -x $bin/$program || -n ${FORCE:-} ]] || return 0
  go=$(find_go)
  echo "==> $program: go build, once, into $bin"
  (cd "$here/$module" && nice "$go" build -o "$bin/$program.new" "$@" "$package")
  mv "$bin/$program.new" "$bin/$program"
}

# version MODULE DEPENDENCY: the version that go.mod pins
version() { awk -v name="$2" '$1 == name { print $2; exit }' "$here/$1/go.mod"; }

control() {
  local v package ld="-s -w" program
  build etcd etcd go.etcd.io/etcd/server/v3 -ldflags "-s -w"
  v=$(version kubernetes k8s.io/kubernetes)
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    ld+=" -X $package.gitVersion=$v -X $package.gitMajor=1 -X $package.gitMinor=$(cut -d. -f2 <<<"$v")"
  done
  # One file holds Kubernetes' programs; links name them.
  build kubernetes hyperkube . -ldflags "$ld"
  for program in kube-apiserver kube-controller-manager kube-scheduler kube-proxy kubelet kubectl; do
    ln -sfn hyperkube "$bin/$program"
  done
}

node() {
  local program containerd=github.com/containerd/containerd/v2
  local ld="-s -w -X $containerd/version.Version=$(version containerd $containerd)"
  for program in containerd containerd-shim-runc-v2 ctr; do
    build containerd "$program" "$containerd/cmd/$program" -ldflags "$ld" -tags no_btrfs,no_zfs,no_devmapper
  done
  for program in main/bridge main/loopback ipam/host-local; do
    build cni "${program#*/}" "github.com/containernetworking/plugins/plugins/$program" -ldflags "-s -w"
  done
  build coredns coredns . -ldflags "-s -w"
  build pause pause . -ldflags "-s -w"
}

mkdir -p "$bin"
exec 9>"$bin/.lock"
flock 9 # a second build waits, and then finds everything there
for group in "${@:-control}"; do
  case $group in
    control | node) "$group" ;;
    go) find_go ;;
    *) echo "unknown group: $group (control, node, go)" >&2; exit 2 ;;
  esac
done
