// A device plugin for nvidia.com/gpu with nothing behind it: pods schedule on the GPUs and see
// NVIDIA_VISIBLE_DEVICES. The file named by the first argument says "TOTAL HEALTHY" and is read again and again.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	endpoint = "mlpipe-gpu.sock"
	pause    = 200 * time.Millisecond
)

type plugin struct {
	api.UnimplementedDevicePluginServer
	file string
}

func (p *plugin) read() (total, healthy int) {
	text, err := os.ReadFile(p.file)
	if err == nil {
		_, err = fmt.Sscan(string(text), &total, &healthy)
	}
	if err != nil {
		log.Printf("%s: %v", p.file, err)
	}
	return total, healthy
}

func (p *plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p *plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	oldTotal, oldHealthy := -1, -1
	for ; stream.Context().Err() == nil; time.Sleep(pause) {
		total, healthy := p.read()
		if total == oldTotal && healthy == oldHealthy {
			continue
		}
		devices := []*api.Device{}
		for i := range total {
			health := api.Healthy
			if i >= healthy {
				health = api.Unhealthy
			}
			devices = append(devices, &api.Device{ID: fmt.Sprintf("GPU-%d", i), Health: health})
		}
		if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		oldTotal, oldHealthy = total, healthy
	}
	return nil
}

func (p *plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, one := range request.ContainerRequests {
		visible := strings.Join(one.DevicesIds, ",")
		response.ContainerResponses = append(response.ContainerResponses,
			&api.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": visible}})
	}
	return response, nil
}

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: gpuplugin FILE")
	}
	path := api.DevicePluginPath + endpoint
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &plugin{file: os.Args[1]})
	go func() { log.Fatal(server.Serve(listener)) }()
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	request := &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: "nvidia.com/gpu"}
	timeout, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := api.NewRegistrationClient(connection).Register(timeout, request, grpc.WaitForReady(true)); err != nil {
		log.Fatal(err)
	}
	log.Print("registered")
	select {}
}
